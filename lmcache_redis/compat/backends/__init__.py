"""A blocking backend that keeps chunks in memory, on disk, in Redis, or in several of these.

backend   the calls of a backend, what they promise, and the thread that owns its cache
storage   where it keeps chunks
buffers   the callers' buffers and tensors
"""

from lmcache_redis.compat.backends.backend import ChunkBackend
from lmcache_redis.compat.backends.storage import in_memory, in_redis, on_disk

__all__ = ["ChunkBackend", "in_memory", "in_redis", "on_disk"]
