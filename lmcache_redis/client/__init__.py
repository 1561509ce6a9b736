"""Engine-neutral clients of the agent: one for an engine's scheduler, one for each worker.

scheduler       lookups, canaries, and watching which chunks come and go in the agent's tiers
worker          registers a KV cache; stores and retrieves
transfers       a store or a retrieve, and when its blocks are free again
link            the connection to the agent, on a thread, and the calls that go over it
control         requests of command-line tools
"""
