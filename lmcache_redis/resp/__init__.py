"""The Redis data plane. `RedisPlane` is its interface (docs/data-plane.md).

plane               everything below, started and closed together
calls               calls about keys, routed to the servers that have them
control             questions on a server's control connection: their commands and replies
node                the servers, each with its threads, by the map
reading, writing    a chunk in flight, and the end of each of its stripes
lanes               a thread with several connections, for stripes
bulk                stripes between sockets and slots: one call for many, native or in Python
health              whether a server is up, and the threads that connect to it while it is
jobs                work that is answered exactly once, at its deadline by the timekeeper; queues
net                 URLs, connections and RESP
"""

from lmcache_redis.resp.net.endpoint import check_url
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    PlaneState,
    PlaneStats,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    WriteOutcome,
)

__all__ = [
    "CallOutcome",
    "ChunkIO",
    "ExistsResult",
    "PlaneState",
    "PlaneStats",
    "ReadOutcome",
    "RedisOptions",
    "RedisPlane",
    "RemoveResult",
    "ScanResult",
    "WriteOutcome",
    "check_url",
]
