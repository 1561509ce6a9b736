# SPDX-License-Identifier: Apache-2.0
"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread that makes every decision, owns the cache and the sessions, and
never blocks. Copy threads (`copies`) move bytes between blocks and slots; threads of the tiers move
bytes between slots and files or sockets. Both post their results to the loop.

A question passes through `service` to `registering` (an engine's memory) or to a job: of `lookups`,
`jobs` (stores and retrieves) or `comparing` (canaries). `peers` are the connections and what
canaries have found, `sessions` the pins of requests and what became of them. The chunks are in
`lmcache_redis.cache`.

Threads, as the kernel names them (`top -H`, perf, py-spy):

    lmcache-redis                 the loop
    gather-cpu-0, scatter-cpu-0   copies from and to engines on the CPU, and of each GPU its own
    scatter-regis-0               mappings of engines' memory
    lmcr-get-0, lmcr-set-0        stripes from and to a server of Redis
    lmcr-control                  questions about keys, and probes, of each server
    lmcr-time                     deadlines of the data plane
    lmcr-topology, lmcr-removals  maps of a cluster or Sentinels; evictions, for routers
    redis-name                    a look-up of a server's name, while it lasts
    disk-read-0, disk-write-0     files of the disk tier; lmcr-watch: whether they hang
    lmcr-metrics, lmcr-record     the address of --metrics; --record
    lmcr-prefault, lmcr-pin       memory of the host pool, at the start; for GPUs
    lmcr-close, lmcr-embedded     GPU memory that is let go; the agent's own server
    ZMQbg/...                     ZeroMQ's

An engine has lmcr-link, one to each agent that it asks, and `adapter files` while it looks at some.

Beside that way: `agent` (what an agent consists of, its status; `sharing`: which of its engines
share), `main` (start, reload, stop), `embedded` (a Redis of the agent), and a wing, `reports`: what
an agent says of itself.
"""
