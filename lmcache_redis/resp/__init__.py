"""The Redis data plane. `RedisPlane` is its interface (docs/data-plane.md).

plane               everything below, started and closed together
calls               calls about keys, routed to the servers that have them
control, query      questions on a server's control connection, and how their replies are read
node                the servers, each with its threads
reading, writing    a chunk in flight, and what follows from the end of a stripe
worker              a thread with its connections and its queue: one class for reads and writes
bulk                stripes between sockets and slots: one call for many, native or in Python
health              whether a server is up
jobs                work that is answered exactly once
outcomes            what the plane is asked for and what it answers
net                 URLs, connections and RESP
"""

from lmcache_redis.resp.net.endpoint import check_url
from lmcache_redis.resp.net.options import RedisOptions
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
