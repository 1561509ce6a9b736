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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lmcache_redis.device.blocks import TensorView, block_dimension
from lmcache_redis.integrations.vllm import needs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_redis")

_BLOCKS = 2
# 64 values with two bits of mantissa: exact in float32, bfloat16, float16, e4m3 and e5m2.
_VALUES = [
    sign * (1 + quarters / 4) * 2.0**exponent
    for sign in (1, -1)
    for exponent in range(-3, 5)
    for quarters in range(4)
]


def kv_identity(
    vllm_config: VllmConfig,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size_tokens: int,
    block_strides: Mapping[str, int],
) -> dict[str, str]:
    """Pairs that identify how the layers of ``kv_caches`` pack and scale their KV.

    Never raises and does not change the engine. Layers that cannot be probed are identified by
    their backend and the dtype of their cache; one log line lists them.
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
            scales.append(_scales(layer))
            # A kernel's blocks may be parts of the engine's blocks.
            bound = needs.LAYER_CACHE.of(layer)
            cache = bound if isinstance(bound, torch.Tensor) and bound.numel() else tensor
            kind = _kind(layer, cache)
            if kind not in found:
                stride = block_strides.get(name)
                scratch = _scratch(cache, num_blocks, stride, block_size_tokens)
                with torch.inference_mode():
                    found[kind] = _probe(layer, *scratch, vllm_config.model_config.dtype)
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
    return {"kv_packing": digest_of(digests), "kv_scales": digest_of(scales)}


def digest_of(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _scales(layer: Any) -> list[list[float] | None]:
    return [
        each.detach().double().flatten().tolist() if isinstance(each, torch.Tensor) else None
        for each in (needs.K_SCALE.of(layer), needs.V_SCALE.of(layer))
    ]


def _kind(layer: Any, cache: torch.Tensor) -> str:
    """Layers of one kind share a probe."""
    sizes = [each.of(layer) for each in needs.LAYER_SIZES]
    impl, dtype = needs.LAYER_IMPL.of(layer), needs.KV_CACHE_DTYPE.of(layer)
    backend = f"{type(impl).__module__}.{type(impl).__qualname__}"
    storage = (tuple(cache.shape), cache.stride(), cache.dtype)
    variant = (needs.ISA.of(layer), dtype, vars(impl).get("attn_type"))
    return repr((backend, sizes, storage, variant, _scales(layer)))


def _unprobed(layer: Any, registered: torch.Tensor) -> str:
    """What is known of a layer whose backend cannot write."""
    backend = needs.LAYER_IMPL.of(layer)
    settings = [needs.ISA.of(layer), needs.KV_CACHE_DTYPE.of(layer)]
    return repr((type(layer).__name__, type(backend).__qualname__, settings, registered.dtype))


def _probe(
    layer: Any, memory: torch.Tensor, cache: torch.Tensor, tokens: int, dtype: torch.dtype
) -> str:
    """The digest of ``memory``, whose view ``cache`` has room for ``tokens``."""
    slots = torch.arange(tokens, dtype=torch.int64, device=cache.device)
    # Backends keep state from the first cache that they see.
    layer, impl = copy.copy(layer), copy.copy(needs.LAYER_IMPL.of(layer))
    update, dtype_name = needs.KV_UPDATE.of(impl), needs.KV_CACHE_DTYPE.of(layer)
    latent = needs.KV_LORA_RANK.is_in(layer)  # MLA: a latent vector per token, and a rotary part
    if latent:
        shapes = [(tokens, layer.kv_lora_rank), (tokens, 1, layer.qk_rope_head_dim)]
    else:
        value_size = needs.HEAD_SIZE_V.of(layer) or layer.head_size
        shapes = [(tokens, layer.num_kv_heads, size) for size in (layer.head_size, value_size)]
    elements = sum(math.prod(shape) for shape in shapes)
    digest = hashlib.blake2b(digest_size=16)
    digit = 1
    while digit < elements:
        memory.zero_()
        key, value = _known(layer, shapes, digit, dtype, slots.device)
        if latent:
            update(key, value, cache, slots, dtype_name, needs.K_SCALE.of(layer))
        else:
            update(layer, key, value, cache, slots)
        digest.update(memory.cpu().numpy().tobytes())
        digit *= len(_VALUES)
    return digest.hexdigest()


def _known(
    layer: Any, shapes: list[tuple[int, ...]], digit: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """K and V of one round: of each element's index, the digit with the value ``digit``."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device=device)
    known = []
    first = 0
    for shape, scale in zip(shapes, (needs.K_SCALE, needs.V_SCALE), strict=True):
        indices = torch.arange(first, first + math.prod(shape), device=device)
        first += math.prod(shape)
        numbers = values[(indices // digit) % len(_VALUES)].reshape(shape)
        factor = scale.of(layer)
        if str(needs.KV_CACHE_DTYPE.of(layer)).startswith("fp8") and isinstance(
            factor, torch.Tensor
        ):
            factor = factor.to(device=device, dtype=torch.float32)
            numbers = numbers * (factor if factor.numel() == 1 else factor.reshape(-1, 1))
        known.append(numbers.to(dtype))
    return known


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
