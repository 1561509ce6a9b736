"""The size of a model in an engine: its layers, in groups, as parts of chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_redis.admin.sizes.config import Fields, text_fields
from lmcache_redis.admin.sizes.families import layers_of
from lmcache_redis.admin.sizes.layers import (
    DTYPE_BYTES,
    KV_DTYPES,
    PACKED_LATENT,
    AttentionLayer,
    ElementTypes,
    Layer,
    StateLayer,
)
from lmcache_redis.admin.sizes.sizing import EngineOptions, ModelSize, SizedGroup
from lmcache_redis.admin.sizes.stored import stored_part
from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import ConfigError

# vLLM's smallest block on a GPU; beside the states of recurrent layers blocks are larger.
_BLOCK_TOKENS = 16


def size_model(config: Mapping[str, Any], name: str, options: EngineOptions) -> ModelSize:
    """The size of a model by its config. name: of the model, in keys and errors.

    Raises ConfigError for a model or a type of elements that is not known.
    """
    fields = text_fields(config, name)
    layers = layers_of(fields)
    types = _element_types(fields, config, options)
    if types.kv.startswith("fp8") and types.kv != PACKED_LATENT and _has_index(layers):
        raise ConfigError(
            f"--kv-cache-dtype {types.kv}: vLLM's layout for {fields.get('model_type')} depends on "
            f"the GPU: give {PACKED_LATENT}, or bfloat16"
        )
    block_tokens = _block_tokens(layers, types, options.tp)
    chunk_tokens = -(-options.chunk_size_tokens // block_tokens) * block_tokens
    alike: dict[Reach, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(layer.reach, []).append(layer)
    shares = len({layer.heads for layer in layers if isinstance(layer, AttentionLayer)}) == 1
    groups = []
    for reach, some in alike.items():
        blocks = reach.blocks_per_part(chunk_tokens // block_tokens, block_tokens)
        groups.append(_group(reach, some, types, options, name, blocks * block_tokens, shares))
    model_type = str(fields.get("model_type"))
    return ModelSize(name, model_type, types, options, chunk_tokens, tuple(groups))


def _group(
    reach: Reach,
    layers: Sequence[Layer],
    types: ElementTypes,
    options: EngineOptions,
    name: str,
    part_tokens: int,
    shares: bool,
) -> SizedGroup:
    """shares: ranks that hold the same bytes store them once; else each stores its own."""
    ranks = options.tp
    attention = [layer for layer in layers if isinstance(layer, AttentionLayer)]
    token_bytes = sum(layer.token_bytes(types) for layer in attention)
    on_ranks = sum(layer.token_bytes(types) * layer.copies(ranks) for layer in attention)
    states = [layer for layer in layers if isinstance(layer, StateLayer)]
    state_bytes = sum(layer.state_bytes(types, ranks) for layer in states)
    copies = math.gcd(*(layer.copies(ranks) for layer in attention)) if shares and attention else 1
    part_bytes = (on_ranks * part_tokens if attention else state_bytes) // ranks
    kind = "state" if states else "MLA" if all(layer.latent for layer in attention) else "attention"
    part = stored_part(part_bytes, options.slot_bytes, name)
    return SizedGroup(
        kind, reach, len(layers), token_bytes, on_ranks, state_bytes, ranks // copies, part
    )


def _has_index(layers: Sequence[Layer]) -> bool:
    return any(isinstance(layer, AttentionLayer) and layer.extra_bytes for layer in layers)


def _block_tokens(layers: Sequence[Layer], types: ElementTypes, ranks: int) -> int:
    """vLLM makes blocks so large that the keys of one layer's block take the room of a state."""
    states = [each.state_bytes(types, ranks) for each in layers if isinstance(each, StateLayer)]
    tokens = [
        each.token_bytes(types) * each.copies(ranks)
        for each in layers
        if isinstance(each, AttentionLayer)
    ]
    if not states or not tokens:
        return _BLOCK_TOKENS
    return -(-max(states) // (_BLOCK_TOKENS * tokens[0])) * _BLOCK_TOKENS


def _element_types(
    fields: Fields, config: Mapping[str, Any], options: EngineOptions
) -> ElementTypes:
    """As vLLM chooses them with its --dtype auto, which makes float32 two bytes wide."""
    if options.kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype!r}: give one of {', '.join(KV_DTYPES)}"
        )
    dtype = str(fields.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype == "float32":
        dtype = "bfloat16"
    if dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"{fields.where}: the dtype {dtype!r} is not one that vLLM runs")
    kv = options.kv_cache_dtype
    if kv == "auto":
        kv = _of_checkpoint(config, fields.where) or dtype
    conv = "float32" if kv == "float32" else dtype
    if options.state_dtype not in ("auto", *DTYPE_BYTES):
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {options.state_dtype!r}: give auto, float32, bfloat16 or "
            "float16"
        )
    return ElementTypes(kv, conv, options.state_dtype)


def _of_checkpoint(config: Mapping[str, Any], where: str) -> str | None:
    """The type of keys and values that a quantized checkpoint names, which vLLM then uses."""
    quantized = config.get("quantization_config") or {}
    inner = quantized.get("quantization") or quantized
    scheme = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    if str(scheme).lower() in ("fp8", "float8"):
        return "fp8"
    raise ConfigError(
        f"{where}: its checkpoint stores keys and values as {scheme!r}, whose size is not known: "
        "give --kv-cache-dtype"
    )
