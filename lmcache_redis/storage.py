"""The former name of `lmcache_redis.backends`: its public names can be imported from here too."""

from lmcache_redis.backends import (
    LMCBackendInterface,
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
