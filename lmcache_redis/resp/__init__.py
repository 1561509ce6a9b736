"""The Redis data plane. `RedisPlane` is the door; docs/data-plane.md has the whole story.

options, endpoint   what the user decided; the servers that a URL names
outcomes            what the plane is asked for and what it answers
stream, connect     a socket with a deadline; connections made and let in
wire, connection    RESP as bytes, bounded; commands out and replies in
bulk                stripes between sockets and slots: one call for many, native or in Python
jobs                work that is answered exactly once
health              whether a server is worth asking
worker              a thread with its connections and its queue: one class for reads and writes
reading, writing    a chunk in flight, and what follows from the end of a stripe
topology            which servers there are, and which has a key
control, query      questions to one server: its control connection, and what is asked on it
node                the servers, each with its threads
calls               calls about keys, routed to the servers that have them
plane               all of it, started and closed together
"""

from lmcache_redis.resp.endpoint import check_url
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ChunkIO,
    ClearResult,
    ExistsResult,
    PlaneState,
    PlaneStats,
    ReadOutcome,
    ScanResult,
    WriteOutcome,
)
from lmcache_redis.resp.plane import RedisPlane

__all__ = [
    "CallOutcome",
    "ChunkIO",
    "ClearResult",
    "ExistsResult",
    "PlaneState",
    "PlaneStats",
    "ReadOutcome",
    "RedisOptions",
    "RedisPlane",
    "ScanResult",
    "WriteOutcome",
    "check_url",
]
