# SPDX-License-Identifier: Apache-2.0
"""Named values and blocking calls over one cache: under KVStore, the gateway, LMCache's backends.

backend   `ChunkBackend`: its calls, what they promise, and the thread that owns its cache
storage   where it keeps chunks: memory, files of a directory, Redis
cache     `ObjectCache`: chunks of any size by `ObjectKey`, over a `Cache` of heap memory
buffers   the callers' buffers and tensors
"""

from lmcache_redis.objects.backend import ChunkBackend
from lmcache_redis.objects.storage import in_memory, in_redis, on_disk

__all__ = ["ChunkBackend", "in_memory", "in_redis", "on_disk"]
