# SPDX-License-Identifier: Apache-2.0
"""Engine-neutral clients of the agent: one for an engine's scheduler, one for each worker.

scheduler       lookups, canaries, and watching which chunks come and go in the agent's tiers
worker          stores and retrieves, and when their blocks are free again
registering     what a worker registers: its KV cache, and the names of its parts
link            the connection to the agent, on a thread, and the calls that go over it
news            what the link knows of the agent, and says in the log
control         requests of command-line tools

They log as ``vllm.lmcache_redis``: vLLM shows what is below ``vllm``, in its own format. Elsewhere
it is a name like any other.
"""
