"""What the tensors of a KV cache say about its blocks and elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcache_redis.chunks.metadata import dtype_name

if TYPE_CHECKING:
    import torch


def check_tensors(kv_caches: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(kv_caches, Mapping):
        raise TypeError(f"kv_caches is a dict of tensors, not {type(kv_caches).__name__}")
    if not kv_caches:
        raise ValueError("kv_caches is empty: there is nothing to register")
    for name, cache in kv_caches.items():
        if not hasattr(cache, "untyped_storage"):
            raise TypeError(f"KV cache {name!r} is a {type(cache).__name__}, not a tensor")


def count_blocks(kv_caches: Mapping[str, torch.Tensor], block_size: int) -> int:
    """The number of blocks, from shapes as vLLM has them: [blocks, ...], or [K and V, blocks, ...].

    Raises ValueError where it is not certain.
    """
    found: dict[int, str] = {}
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
        found.setdefault(shape[counting], name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"KV cache {first!r} has {one} blocks and {second!r} has {other}: pass num_blocks, or "
            "use WorkerClient.register_groups for layers that do not share their block ids"
        )
    return next(iter(found))


def common_dtype(kv_caches: Mapping[str, torch.Tensor]) -> str:
    names = sorted({dtype_name(cache.dtype) for cache in kv_caches.values()})
    if len(names) > 1:
        raise ValueError(f"KV caches of {' and '.join(names)}: pass the model's dtype")
    return names[0]
