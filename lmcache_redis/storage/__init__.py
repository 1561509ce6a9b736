"""Tiers of chunks, each usable alone.

interface   what every tier can do
tensors     tensors as bytes and back
local       a tier in host memory
disk        a tier in a directory
remote      a tier in Redis or Valkey
pipelined   the same, with several chunks of a batch on their way
hybrid      tiers above each other

Their classes can be had from here; each is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_redis.storage.disk import LMCLocalDiskBackend
    from lmcache_redis.storage.hybrid import LMCHybridBackend
    from lmcache_redis.storage.interface import LMCBackendInterface
    from lmcache_redis.storage.local import LMCLocalBackend
    from lmcache_redis.storage.pipelined import LMCPipelinedRemoteBackend
    from lmcache_redis.storage.remote import LMCRemoteBackend

__all__ = [
    "LMCBackendInterface",
    "LMCHybridBackend",
    "LMCLocalBackend",
    "LMCLocalDiskBackend",
    "LMCPipelinedRemoteBackend",
    "LMCRemoteBackend",
]

_MODULES = {
    "LMCBackendInterface": "interface",
    "LMCHybridBackend": "hybrid",
    "LMCLocalBackend": "local",
    "LMCLocalDiskBackend": "disk",
    "LMCPipelinedRemoteBackend": "pipelined",
    "LMCRemoteBackend": "remote",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
