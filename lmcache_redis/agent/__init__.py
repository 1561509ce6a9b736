"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread that makes every decision, owns the cache and the sessions, and
never blocks. Copy threads (`copies`) move bytes between blocks and slots; threads of the tiers move
bytes between slots and files or sockets. Both post their results to the loop.

A question passes through `service` to `registering` (an engine's memory) or to a job: of `lookups`,
`jobs` (stores and retrieves) or `comparing` (canaries). `peers` are the connections and what
canaries have found, `sessions` the pins of requests and what became of them. The chunks are in
`lmcache_redis.cache`.

Beside that way: `agent` (what an agent consists of, its status), `main` (start, reload, stop),
`embedded` (a Redis of the agent), and a wing, `reports`: what an agent says of itself.
"""
