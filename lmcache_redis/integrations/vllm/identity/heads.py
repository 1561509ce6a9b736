# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a KV cache belong to which head: what engines of several TP sizes need to share.

Every layer's own backend writes known K and V into a scratch cache, as in `probe`. A dimension of
the cache counts heads if

- another K and V of one head changes bytes of this head's part of the cache, and of no other;
- equal K and V of all heads make equal parts. Their digest says which (K or V, token, element) each
  byte of a head is, whatever other heads a rank has. It is ``kv_packing``.

A cache that this does not explain is not cut: token-major, with layers that have other numbers of
heads, or with scales of each head beside it. Nor is that of a model which may be another one at
another size: dummy weights are drawn by rank, quantized ones may be scaled by rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lmcache_redis.chunks.keys import MAX_WORLD_SIZE
from lmcache_redis.device.blocks import TensorView
from lmcache_redis.device.shares import (
    HeadShares,
    Share,
    default_shares,
    find_share,
    shares_of_rank,
)
from lmcache_redis.errors import DeviceError, Unsupported
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.identity.engine_identity import draft_model
from lmcache_redis.integrations.vllm.identity.probe import (
    ScratchCache,
    cache_of,
    digest_of,
    kind_of,
    numbered,
    scales_of,
)
from lmcache_redis.integrations.vllm.identity.weights import load_format_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cut_by_head(
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    heads: int | None,
    shares: int | None,
    **how: Any,
) -> tuple[HeadShares, dict[str, str]]:
    """How this rank's layers are cut, and the pairs that are the same at every TP size.

    heads: of the model; None if layers differ. shares: None: the default. how: as for
    `explained_heads`. Raises Unsupported or ConfigError with the reason why they cannot be cut.
    """
    parallel = vllm_config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, rank = divmod(parallel.rank, ranks)
    if not heads:
        raise Unsupported("its layers have different numbers of KV heads")
    if why := _why_another_model(vllm_config):
        raise Unsupported(why)
    shares = shares or default_shares(heads)
    if (count := stages * shares) > MAX_WORLD_SIZE:
        raise Unsupported(f"{stages} stages with {shares} shares are more than {MAX_WORLD_SIZE}")
    own = [
        Share(stage * shares + number, first, of_share)
        for number, first, of_share in shares_of_rank(heads, shares, rank, ranks)
    ]
    dims, pairs = explained_heads(vllm_config, kv_caches, max(1, heads // ranks), **how)
    pairs |= {"tensor_parallel": "any", "rank": f"stage {stage} of {stages}"}
    return HeadShares(dims, own, count), pairs


def _why_another_model(vllm_config: VllmConfig) -> str:
    """Why other TP sizes compute with other weights; empty if they do not."""
    if draft_model(vllm_config) is not None:
        return "the heads of its draft model are not known"
    if load_format_of(vllm_config.load_config) == "dummy":
        return "--load-format dummy draws other weights at each size"
    if method := needs.QUANTIZATION.of(vllm_config.model_config):
        return f"its weights are quantized ({method}), and may be scaled by rank"
    return ""


def explained_heads(
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    heads: int,
    *,
    num_blocks: int,
    block_size_tokens: int,
    block_strides: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """Each tensor's dimension that counts the rank's ``heads``, and the pairs of `kv_identity`.

    Does not change the engine. Raises Unsupported with the reason why the caches cannot be cut.
    """
    context = vllm_config.compilation_config.static_forward_context
    dims: dict[str, int] = {}
    found: dict[str, tuple[int, str]] = {}
    digests: list[str] = []
    scales: list[object] = []
    readers: dict[str, str] = {}  # layers that read the KV of another
    for name, tensor in kv_caches.items():
        layer = context.get(name)
        if (target := needs.SHARED_LAYER.of(layer)) is not None:
            readers[name] = target
            continue
        try:
            _check(layer, tensor, heads)
            scales.append(scales_of(layer))
            kind = kind_of(layer, tensor)
            if kind not in found:
                stride = block_strides.get(name)
                with torch.inference_mode():
                    scratch = ScratchCache(layer, tensor, num_blocks, stride, block_size_tokens)
                    view = TensorView.of(tensor, name, str(tensor.dtype), storage=0)
                    dtype = vllm_config.model_config.dtype
                    found[kind] = _look(scratch, view, num_blocks, stride, heads, dtype)
            dims[name], digest = found[kind]
            digests.append(digest)
        except Exception as error:  # a backend may raise anything
            raise Unsupported(f"{name}: {error}") from error
    try:
        dims.update((name, dims[target]) for name, target in readers.items())
    except KeyError as error:
        raise Unsupported(f"a layer reads the KV of {error}, which has none here") from error
    return dims, {"kv_packing": digest_of(digests), "kv_scales": digest_of(scales)}


def _check(layer: Any, tensor: torch.Tensor, heads: int) -> None:
    """Raises Unsupported for what need not be looked at."""
    found = needs.NUM_KV_HEADS.of(layer)
    if found != heads:
        raise Unsupported(f"it has {found} KV heads on this rank, and not {heads}")
    if any(each is not None and len(each) != 1 for each in scales_of(layer)):
        raise Unsupported("its heads have scales of their own")
    cache = cache_of(layer, tensor)
    seen = [(each.data_ptr(), each.shape, each.stride()) for each in (cache, tensor)]
    if seen[0] != seen[1]:
        raise Unsupported("its kernel sees another shape than was registered")


def _look(
    scratch: ScratchCache,
    view: TensorView,
    num_blocks: int,
    stride: int | None,
    heads: int,
    dtype: torch.dtype,
) -> tuple[int, str]:
    """The dimension that counts heads, and the digest of a head's part."""
    hints = {} if stride is None else {view.name: stride}
    found: dict[int, str] = {}
    why = f"it has no dimension of {heads} heads"
    for dim in (dim for dim, size in enumerate(view.shape) if size == heads):
        try:
            find_share([view], num_blocks, {view.name: dim}, Share(0, 0, heads), hints)
            found[dim] = _explained(scratch, dim, dtype)
        except (DeviceError, Unsupported) as error:  # noqa: PERF203
            why = str(error)
    # Of one head, dimensions of size 1 may mean the same.
    if len({view.strides[dim] for dim in found}) != 1:
        raise Unsupported(why if not found else "several dimensions may count heads")
    return next(iter(found.items()))


def _explained(scratch: ScratchCache, dim: int, dtype: torch.dtype) -> str:
    """The digest of one head's part, if every head's part is its own and like the others."""
    parts = scratch.cache.split(1, dim)
    alike = [torch.ones(shape) for shape in scratch.shapes]
    for head, part in enumerate(parts):
        other = [each.clone() for each in alike]
        for each in other:
            each[:, head] = 2.0
        found = []
        for numbers in (alike, other):
            scratch.write(numbers, dtype)
            own = _bytes_of(part)
            part.zero_()
            found.append((own, _bytes_of(scratch.memory)))
        (before, rest), (after, same) = found
        if torch.equal(before, after) or not torch.equal(rest, same):
            raise Unsupported(f"dimension {dim} does not count heads")
    digest = hashlib.blake2b(digest_size=16)
    of_a_head = [(shape[0], 1, shape[2]) for shape in scratch.shapes]
    for numbers in numbered(of_a_head):
        scratch.write([each.repeat(1, len(parts), 1) for each in numbers], dtype)
        first, *others = [_bytes_of(part) for part in parts]
        if not all(torch.equal(first, each) for each in others):
            raise Unsupported("its heads are packed differently")
        digest.update(first.cpu().numpy().tobytes())
    return digest.hexdigest()


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """A copy, on its device."""
    return part.clone(memory_format=torch.contiguous_format).view(torch.uint8)
