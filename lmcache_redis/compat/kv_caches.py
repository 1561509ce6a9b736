# SPDX-License-Identifier: Apache-2.0
"""What the tensors of an engine's KV cache say of themselves, where a caller gives nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcache_redis.chunks.metadata import dtype_name

if TYPE_CHECKING:
    import torch


def count_blocks(kv_caches: Mapping[str, torch.Tensor], block_size: int) -> int:
    """The number of blocks, from shapes as vLLM has them: [blocks, ...], or [K and V, blocks, ...].

    Raises ValueError where it is not certain.
    """
    counts: set[int] = set()
    for name, cache in kv_caches.items():
        shape = tuple(cache.shape)
        counting = 1 if shape[:1] == (2,) else 0
        # [2, block size, ...] may also be two blocks.
        unsure = shape[0:1] == (1,) or (counting == 1 and shape[1:2] == (block_size,))
        if unsure or len(shape) < counting + 2:
            raise ValueError(
                f"which dimension of KV cache {name!r} counts blocks does not follow from its "
                f"shape {list(shape)}: pass num_blocks"
            )
        counts.add(shape[counting])
    if len(counts) != 1:
        raise ValueError(
            f"KV caches with {sorted(counts)} blocks: pass num_blocks, or use "
            "WorkerClient.register_groups for layers that do not share their block ids"
        )
    return counts.pop()


def common_dtype(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """The dtype of all tensors. Raises ValueError if they have several."""
    names = sorted({dtype_name(cache.dtype) for cache in kv_caches.values()})
    if len(names) > 1:
        raise ValueError(f"KV caches of {' and '.join(names)}: pass the model's dtype")
    return names[0]
