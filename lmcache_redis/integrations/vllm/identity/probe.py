# SPDX-License-Identifier: Apache-2.0
"""A digest of how an engine packs K and V into its KV cache.

Engines with equal shapes, strides and names may pack differently: vLLM's CPU backend depends on
the instruction set of the host, GPU backends on the kernel. So every layer's own backend writes
known K and V into a scratch cache, and the digest of the resulting bytes is part of the identity.

The known values are exact in every cache dtype (fp8 after scaling). Each element is the number of
its place, one digit in each round.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_redis.device.blocks import TensorView, block_dimension
from lmcache_redis.integrations.vllm import needs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_redis")

_BLOCKS = 2
# 64 values with two bits of mantissa: exact in float32, bfloat16, float16, e4m3 and e5m2.
VALUES = [
    sign * (1 + quarters / 4) * 2.0**exponent
    for sign in (1, -1)
    for exponent in range(-3, 5)
    for quarters in range(4)
]


def kv_identity(
    vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor], **how: Any
) -> dict[str, str]:
    """Pairs that identify how the layers of ``kv_caches`` pack and scale their KV (`probe`)."""
    return probe(vllm_config, kv_caches, **how)[0]


def probe(
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size_tokens: int,
    block_strides: Mapping[str, int],
) -> tuple[dict[str, str], list[str]]:
    """The pairs of `kv_identity`, and the kinds of layers that cannot be probed.

    Never raises and does not change the engine. Those are identified by their backend and the dtype
    of their cache; one log line lists them.
    """
    context = vllm_config.compilation_config.static_forward_context
    found: dict[str, str] = {}
    digests: list[str] = []
    scales: list[object] = []
    unknown: dict[str, str] = {}
    for name, tensor in kv_caches.items():
        layer = context.get(name)
        if needs.SHARED_LAYER.of(layer) is not None:
            continue  # it reads the KV of another layer
        try:
            scales.append(scales_of(layer))
            cache = cache_of(layer, tensor)
            kind = kind_of(layer, cache)
            if kind not in found:
                stride = block_strides.get(name)
                with torch.inference_mode():
                    scratch = ScratchCache(layer, cache, num_blocks, stride, block_size_tokens)
                    found[kind] = _probe(scratch, vllm_config.model_config.dtype)
            digests.append(found[kind])
        except Exception as error:  # a backend may raise anything
            digests.append(_unprobed(layer, tensor))
            unknown.setdefault(type(layer).__name__, f"{name}: {type(error).__name__}: {error}")
    if unknown:
        logger.warning(
            "KV caches are identified by version, backend and dtype alone, because these layers "
            "cannot be probed: %s",
            "; ".join(unknown.values()),
        )
    return {"kv_packing": digest_of(digests), "kv_scales": digest_of(scales)}, sorted(unknown)


def digest_of(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def cache_of(layer: Any, registered: torch.Tensor) -> torch.Tensor:
    """What its backend writes to: a kernel's blocks may be parts of the engine's blocks."""
    bound = needs.LAYER_CACHE.of(layer)
    return bound if isinstance(bound, torch.Tensor) and bound.numel() else registered


def scales_of(layer: Any) -> list[list[float] | None]:
    return [
        each.detach().double().flatten().tolist() if isinstance(each, torch.Tensor) else None
        for each in (needs.K_SCALE.of(layer), needs.V_SCALE.of(layer))
    ]


def kind_of(layer: Any, cache: torch.Tensor) -> str:
    """Layers of one kind share a probe."""
    sizes = [each.of(layer) for each in needs.LAYER_SIZES]
    impl, dtype = needs.LAYER_IMPL.of(layer), needs.KV_CACHE_DTYPE.of(layer)
    backend = f"{type(impl).__module__}.{type(impl).__qualname__}"
    storage = (tuple(cache.shape), cache.stride(), cache.dtype)
    variant = (needs.ISA.of(layer), dtype, vars(impl).get("attn_type"))
    return repr((backend, sizes, storage, variant, scales_of(layer)))


def _unprobed(layer: Any, registered: torch.Tensor) -> str:
    """What is known of a layer whose backend cannot write."""
    backend = needs.LAYER_IMPL.of(layer)
    settings = [needs.ISA.of(layer), needs.KV_CACHE_DTYPE.of(layer)]
    return repr((type(layer).__name__, type(backend).__qualname__, settings, registered.dtype))


class ScratchCache:
    """A cache of two blocks like a layer's own, to which the layer's backend writes.

    shapes: of K and V for all its tokens. memory: its bytes. cache: a view of them.
    """

    def __init__(
        self, layer: Any, like: torch.Tensor, num_blocks: int, stride: int | None, tokens: int
    ) -> None:
        self.memory, self.cache, room = _scratch(like, num_blocks, stride, tokens)
        # Backends keep state from the first cache that they see.
        self._layer, self._impl = copy.copy(layer), copy.copy(needs.LAYER_IMPL.of(layer))
        self._slots = torch.arange(room, dtype=torch.int64, device=like.device)
        self._is_latent = needs.KV_LORA_RANK.is_in(layer)
        if self._is_latent:  # MLA: a latent vector per token, and a rotary part
            self.shapes = [(room, layer.kv_lora_rank), (room, 1, layer.qk_rope_head_dim)]
        else:
            sizes = (layer.head_size, needs.HEAD_SIZE_V.of(layer) or layer.head_size)
            self.shapes = [(room, layer.num_kv_heads, size) for size in sizes]

    def write(self, numbers: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Writes these K and V, and zero elsewhere. numbers: float32, of `VALUES`."""
        layer, update = self._layer, needs.KV_UPDATE.of(self._impl)
        key, value = self._scaled(numbers, dtype)
        self.memory.zero_()
        if self._is_latent:
            name = needs.KV_CACHE_DTYPE.of(layer)
            update(key, value, self.cache, self._slots, name, needs.K_SCALE.of(layer))
        else:
            update(layer, key, value, self.cache, self._slots)

    def _scaled(self, numbers: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        known = []
        for each, scale in zip(numbers, (needs.K_SCALE, needs.V_SCALE), strict=True):
            each, factor = each.to(self._slots.device), scale.of(self._layer)
            if str(needs.KV_CACHE_DTYPE.of(self._layer)).startswith("fp8") and isinstance(
                factor, torch.Tensor
            ):
                factor = factor.to(device=each.device, dtype=torch.float32)
                each = each * (factor if factor.numel() == 1 else factor.reshape(-1, 1))
            known.append(each.to(dtype))
        return known


def _probe(scratch: ScratchCache, dtype: torch.dtype) -> str:
    """The digest of what the layer's backend writes."""
    digest = hashlib.blake2b(digest_size=16)
    for numbers in numbered(scratch.shapes):
        scratch.write(numbers, dtype)
        digest.update(scratch.memory.cpu().numpy().tobytes())
    return digest.hexdigest()


def numbered(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[torch.Tensor]]:
    """K and V for each round: of each element's number, one digit as a value."""
    values = torch.tensor(VALUES, dtype=torch.float32)
    sizes = [math.prod(shape) for shape in shapes]
    digit = 1
    while digit < sum(sizes):
        digits = values[torch.arange(sum(sizes)) // digit % len(VALUES)]
        yield [part.reshape(shape) for part, shape in zip(digits.split(sizes), shapes, strict=True)]
        digit *= len(VALUES)


def _scratch(
    cache: torch.Tensor, num_blocks: int, block_stride: int | None, block_size_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Bytes, a view of them that is like ``cache`` with two blocks, and the tokens of these.

    Strides of dimensions outside the block dimension (K before V) shrink with it.
    """
    view = TensorView.of(cache, "kv_cache", str(cache.dtype), storage=0)
    dim, parts = block_dimension(view, num_blocks, block_stride)
    blocks = min(_BLOCKS, num_blocks)
    size = list(cache.shape)
    size[dim] = blocks * parts
    # The backend writes at any slot number without a check, so the memory must have room.
    if block_size_tokens % parts or block_size_tokens // parts not in size[:dim] + size[dim + 1 :]:
        raise view.refuse(f"has no dimension of {block_size_tokens} tokens over {parts}")
    whole = cache.stride(dim) * cache.shape[dim]
    strides = [
        stride * size[dim] // cache.shape[dim] if other != dim and stride >= whole else stride
        for other, stride in enumerate(cache.stride())
    ]
    extent = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    memory = torch.zeros(extent * view.itemsize, dtype=torch.uint8, device=cache.device)
    return memory, memory.view(cache.dtype).as_strided(size, strides), blocks * block_size_tokens
