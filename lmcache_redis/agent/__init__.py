"""The agent: one process per node between the engines' memory and Redis.

`service` runs the loop: one thread owns every decision, the host pool and the sessions, and
never blocks. Copy threads (`copies`) move bytes between blocks and slots, the Redis plane's
threads between slots and Redis; both hand their results back to the loop. What the loop
does with a question is in `lookups`, `retrieves`, `stores` and `writes`.
"""
