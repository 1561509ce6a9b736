"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread that makes every decision, owns the cache and the sessions, and
never blocks. Copy threads (`copies`) move bytes between blocks and slots; threads of the tiers move
bytes between slots and files or sockets. Both post their results to the loop.

A question passes through `service` (the socket) and `handlers` (validation, a table by type) to
`registering` (an engine's memory) or to a job: `lookups`, `stores`, `retrieves`, or `comparing`
(canaries; `trust` remembers what they have found). `jobs` is what those that copy have in common.
`peers` are the connections, `sessions` the pins of requests. The chunks are in
`lmcache_redis.cache`.

Beside that way: `agent` (what an agent consists of, its status), `main` (start, reload, stop),
`watching` (chunks reported to schedulers), `history` and `explaining` (why requests missed),
`exported` (metrics for Prometheus) with its `page`, `embedded` (a Redis of the agent).
"""
