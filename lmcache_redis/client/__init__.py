"""Engine-neutral clients of the agent: one for an engine's scheduler, one for each worker.

scheduler       lookups
worker          registers a KV cache; stores and retrieves
transfers       a store or a retrieve, and when its blocks are free again
canary          which hits are compared instead of loaded
watching        which chunks come and go in the agent's tiers
link            the connection to the agent, on a thread
calls           messages to the agent, and their answers
control         requests of command-line tools
"""
