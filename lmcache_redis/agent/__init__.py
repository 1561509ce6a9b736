"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread makes every decision, owns the cache and the sessions, and never
blocks. Copy threads (`copies`) move bytes between blocks and slots, threads of the tiers between
slots and files or sockets; both post their results to the loop.

A question goes through `service` (the socket) and `handlers` (checks) to `registering` (an engine's
memory), `sessions` (pins of a request) or `transfers` (stores and retrieves). The chunks are in
`lmcache_redis.cache`.
"""
