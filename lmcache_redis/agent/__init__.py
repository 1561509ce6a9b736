"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread owns every decision, the cache and the sessions, and never
blocks. Copy threads (`copies`) move bytes between blocks and slots, a tier's threads between slots
and files or sockets; both post their results to the loop. What the loop does with a question is in
`registering`, `lookups`, `retrieves` and `stores`; what it keeps is in `lmcache_redis.cache`.
"""
