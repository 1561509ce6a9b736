# SPDX-License-Identifier: Apache-2.0
"""A KV cache for vLLM that lives in Redis or Valkey and outlives the process.

The path of a chunk, from an engine to Redis and back into another engine:

    1. vLLM finishes a step that completes a chunk of a prompt; the connector names it by
       the hash of its last block                                     integrations.vllm.scheduler
    2. each worker sends STORE with block ids, never with bytes       client.worker, messages
    3. a copy thread gathers the blocks into slots of the host pool   agent.jobs, device
    4. the engine may reuse its blocks; the chunk is enqueued         cache.writebehind
    5. Redis is asked whether it has the chunk                        cache.writebehind, resp.plane
    6. each slot becomes one value: a header, then the payload;
       stripe 0 is written last and makes the chunk visible           resp.transfers, chunks
    7. another engine, later: its scheduler sends LOOKUP              client.scheduler, messages
    8. one grouped EXISTS finds how long the cached prefix is         cache.lookup, resp.control
    9. its stripes are received straight into slots and verified      resp.transfers, chunks
   10. the answer names only chunks that sit pinned in the host pool  cache.lookup, agent.lookups
   11. vLLM allocates blocks; each worker sends RETRIEVE              integrations.vllm.worker
   12. a copy thread scatters the slots into the blocks               agent.jobs, device
   13. vLLM computes the rest of the prompt, as if it had computed all of it

Wrong KV is worse than no KV: at every step, doubt is a miss.

Programs of your own use `KVStore`, or `AsyncKVStore` with asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_redis.kvstore import AsyncKVStore, KVStore
    from lmcache_redis.resp import RedisOptions

__all__ = ["AsyncKVStore", "KVStore", "RedisOptions"]

# `pyproject.toml` reads the version here.
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """What programs use, imported when it is asked for: most of the package does without."""
    if name == "RedisOptions":
        from lmcache_redis.resp import RedisOptions

        return RedisOptions
    if name in __all__:
        from lmcache_redis import kvstore

        return getattr(kvstore, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
