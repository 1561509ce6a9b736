"""The size of a model in an engine: its layers, in groups, as parts of chunks. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_redis.admin.sizes.config import Fields, text_fields
from lmcache_redis.admin.sizes.families import layers_of
from lmcache_redis.admin.sizes.layers import (
    DTYPE_BYTES,
    KV_DTYPES,
    PACKED_LATENT,
    ElementTypes,
    Layer,
)
from lmcache_redis.admin.sizes.sizing import ModelSize, SizedGroup, SizeOptions, stored_part
from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import ConfigError

# vLLM's smallest block on a GPU; beside the states of recurrent layers blocks are larger.
_BLOCK_TOKENS = 16


def size_model(config: Mapping[str, Any], name: str, options: SizeOptions) -> ModelSize:
    """The size of a model by its config. name: of the model, in keys and errors.

    Raises ConfigError for a model or a type of elements that is not known, and if prompts are
    shorter than what is stored.
    """
    fields = text_fields(config, name)
    model_type = str(fields.get("model_type"))
    layers = layers_of(fields)
    types = _element_types(fields, config, options)
    packed = types.kv == PACKED_LATENT or not types.kv.startswith("fp8")
    if not packed and any(layer.extra_bytes for layer in layers):
        raise ConfigError(
            f"--kv-cache-dtype {types.kv}: vLLM's layout for {model_type} depends on the GPU: give "
            f"{PACKED_LATENT}, or bfloat16"
        )
    block_tokens = _block_tokens(layers, types, options.tp)
    chunk_tokens = -(-options.chunk_size_tokens // block_tokens) * block_tokens
    if options.prompt_tokens < chunk_tokens:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens}: prompts are stored in chunks of "
            f"{chunk_tokens} tokens, and a shorter one is never a hit: give more"
        )
    # Ranks that hold the same bytes store them once; if layers differ in that, each its own.
    shares = len({layer.heads for layer in layers if layer.heads}) == 1
    alike: dict[Reach, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(layer.reach, []).append(layer)
    groups = []
    for reach, some in alike.items():
        blocks = reach.blocks_per_part(chunk_tokens // block_tokens, block_tokens)
        token_bytes = [layer.token_bytes(types) for layer in some]
        copies = [layer.copies(options.tp) for layer in some]
        on_ranks = sum(map(operator.mul, token_bytes, copies))
        state_bytes = sum(layer.state_bytes(types, options.tp) for layer in some)
        part_bytes = (on_ranks * blocks * block_tokens or state_bytes) // options.tp
        is_latent = all(layer.latent for layer in some)
        groups.append(
            SizedGroup(
                kind="state" if state_bytes else "MLA" if is_latent else "attention",
                reach=reach,
                layers=len(some),
                bytes_per_token=sum(token_bytes),
                engine_bytes_per_token=on_ranks,
                state_bytes=state_bytes,
                shards=options.tp // (math.gcd(*copies) if shares else 1),
                part=stored_part(part_bytes, options.slot_bytes, name),
            )
        )
    return ModelSize(name, model_type, types, options, chunk_tokens, tuple(groups))


def _block_tokens(layers: Sequence[Layer], types: ElementTypes, ranks: int) -> int:
    """vLLM makes blocks so large that the keys of one layer's block take the room of a state."""
    state_bytes = max(layer.state_bytes(types, ranks) for layer in layers)
    token_bytes = [layer.token_bytes(types) * layer.copies(ranks) for layer in layers]
    if not state_bytes or not any(token_bytes):
        return _BLOCK_TOKENS
    first = next(filter(None, token_bytes))
    return -(-state_bytes // (_BLOCK_TOKENS * first)) * _BLOCK_TOKENS


def _element_types(fields: Fields, config: Mapping[str, Any], options: SizeOptions) -> ElementTypes:
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
