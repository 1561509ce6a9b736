"""The Redis data plane. `RedisPlane` is the door; docs/data-plane.md has the whole story.

options, endpoint   what the user decided, and the server that a URL names
deployment          the Sentinels or cluster nodes that a URL names
connect, greeting   connections made and let in, by a deadline
stream              a socket, and one deadline for all calls on it
wire, connection    RESP as bytes, bounded; commands out and replies in
bulk                stripes straight between sockets and slots
talk, scan          commands sent ahead of their replies; which keys exist, in groups
breaker, health     whether the server is worth asking
jobs, queues        work that is answered exactly once, and how it reaches threads
readjob, writejob   the work of one chunk; bundles: of many small ones together
worker, lanes       a thread with a connection; with several: reader, writer, control
moving, batches     the compiled part, and how a thread has it move many stripes at once
node                one server: its queues and workers, its health
topology, routes    which servers there are, and which has a key
nodes, fanout       all of them, and one call over many
admission           what is worth queueing
chunks, calls       chunks in and out; questions about keys, and removals
plane               all of it, started and closed together
"""

from lmcache_redis.resp.deployment import check_url
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
