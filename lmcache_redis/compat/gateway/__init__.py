"""The `lm://` server: LMCache's TCP protocol on top of a cache.

One asyncio loop owns the cache (`lmcache_redis.compat.objects`), all connections and all decisions.

config      settings
wire        between messages of the protocol and the cache: keys and metadata
budget      a bound for payload bytes in flight
shared      what connections share: cache, budgets, counters, log lines
movers      transfers between sockets and buffers, and threads for the large ones
stream      one socket: receives, sends, TLS, stalls
connection  one client: its requests, one after the other, and what they do with the cache
server      who may connect, limits, stopping
exported    metrics for Prometheus
main        `lmcache-redis gateway`
"""
