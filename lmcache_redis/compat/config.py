# SPDX-License-Identifier: Apache-2.0
"""The settings of LMCache's storage backends (`lmcache.config`): plain data.

The backends take any object with these attributes, so LMCache's own objects work too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["LMCacheEngineConfig", "LMCacheEngineMetadata", "LMCacheMemPoolMetadata"]


@dataclass
class LMCacheEngineConfig:
    """chunk_size: in tokens. local_device: "cpu", "cuda" or a directory. max_local_cache_size: GiB.

    The backends use local_device, max_local_cache_size, remote_url and remote_serde. The other
    fields are for engines.
    """

    chunk_size: int = 256
    local_device: str | None = "cuda"
    max_local_cache_size: float = 5
    remote_url: str | None = "redis://localhost:6379"
    remote_serde: str | None = "torch"
    pipelined_backend: bool = False
    save_decode_cache: bool = False
    enable_blending: bool = False
    blend_recompute_ratio: float = 0.15
    blend_min_tokens: int = 256
    blend_separator: str = "[BLEND_SEP]"
    blend_add_special_in_precomp: bool = False

    @classmethod
    def from_defaults(cls, *values: Any, **settings: Any) -> LMCacheEngineConfig:
        """The same as the constructor: what is not given has LMCache's default."""
        return cls(*values, **settings)


@dataclass
class LMCacheEngineMetadata:
    """One worker of a model. fmt: "vllm" or "huggingface". kv_shape: see LMCacheMemPoolMetadata."""

    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int] | None = None
    use_mla: bool = False


@dataclass
class LMCacheMemPoolMetadata:
    """kv_shape: (layers, 2, tokens of a chunk, heads, head size). max_local_cache_size: GiB."""

    kv_shape: tuple[int, int, int, int, int]
    kv_dtype: torch.dtype
    max_local_cache_size: float
