"""Blocking backends that keep chunks in memory, on disk or in Redis, for use as a library.

interface   the contract of every backend, and tensors
buffers     the callers' buffers
local       memory of the process
tiered      blocking calls over a tier of the cache
disk        a directory
remote      Redis or Valkey; one chunk of a batch in flight, or several
keylocks    of `remote`: a get never overlaps a put or a removal of its key
hybrid      a hierarchy of backends
"""

from lmcache_redis.compat.backends.disk import LMCLocalDiskBackend
from lmcache_redis.compat.backends.hybrid import LMCHybridBackend
from lmcache_redis.compat.backends.interface import LMCBackendInterface
from lmcache_redis.compat.backends.local import LMCLocalBackend
from lmcache_redis.compat.backends.remote import LMCPipelinedRemoteBackend, LMCRemoteBackend

__all__ = [
    "LMCBackendInterface",
    "LMCHybridBackend",
    "LMCLocalBackend",
    "LMCLocalDiskBackend",
    "LMCPipelinedRemoteBackend",
    "LMCRemoteBackend",
]
