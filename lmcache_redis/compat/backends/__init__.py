"""Blocking backends that keep chunks in memory, on disk or in Redis, for use as a library.

interface      the contract of every backend, and blocking calls to its cache
buffers        the callers' buffers and tensors
cache_thread   the thread that owns a backend's cache (`compat.objects`)
kinds          memory, a directory, Redis or Valkey, and a hierarchy of these
"""

from lmcache_redis.compat.backends.interface import LMCBackendInterface
from lmcache_redis.compat.backends.kinds import (
    LMCHybridBackend,
    LMCLocalBackend,
    LMCLocalDiskBackend,
    LMCPipelinedRemoteBackend,
    LMCRemoteBackend,
)

__all__ = [
    "LMCBackendInterface",
    "LMCHybridBackend",
    "LMCLocalBackend",
    "LMCLocalDiskBackend",
    "LMCPipelinedRemoteBackend",
    "LMCRemoteBackend",
]
