"""The adapters of vLLM's ``lmcache_integration.multi_process_adapter``, with their arguments.

An engine has one scheduler adapter and a worker adapter for each rank, all with one agent. As in
the originals, the constructors return when the agent has told its chunk size, and
``register_kv_caches`` when the agent has mapped the memory; both wait at most ``timeout_s``.

docs/reference/lmcache-names.md lists what differs from the originals. ``context`` is checked and
not used: an adapter has its own, because its thread closes its sockets, and a caller that ends a
shared context first would wait for that thread, or race with it. Several engines of one model may
differ in what their chunks hold, so an engine has a name here: ``engine_id``, or
``$LMCACHE_REDIS_ENGINE_ID`` in all its processes. Without one the adapters find each other as
`default_engine_id` says or, as in the originals, by model name and world size; then lookups miss
while workers of different layouts are registered under these.

A restarted agent is found again. Without an agent, lookups miss and stores are dropped.
"""

from lmcache_redis.compat.multi_process_adapter.operations import LoadStoreOp
from lmcache_redis.compat.multi_process_adapter.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.compat.multi_process_adapter.worker import LMCacheMPWorkerAdapter

__all__ = ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LoadStoreOp"]
