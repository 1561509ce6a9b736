# SPDX-License-Identifier: Apache-2.0
"""How large the KV cache of a model is: of a token, of a chunk, in a memory, on a link. Pure.

Redis holds a part of a chunk as stripes, with headers, keys, and the server's share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_redis.admin.sizes.families import (
    DTYPE_BYTES,
    KV_DTYPES,
    PACKED_LATENT,
    ElementTypes,
    Fields,
    Layer,
    layers_of,
    text_fields,
)
from lmcache_redis.chunks.cutting import allocated_bytes, stripe_payload_bytes
from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.chunks.keys import NAMESPACE_BYTES, hash_tag
from lmcache_redis.chunks.names import Reach, key_stem, stripe_key
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError

# vLLM's smallest block on a GPU; beside the states of recurrent layers blocks are larger.
_BLOCK_TOKENS = 16
# vLLM's block hashes are SHA-256.
_HASH = bytes(32)
# Plain bytes to those that --compress lossless stores: measured with KV of SmolLM2-135M.
EXPECTED_RATIO = {
    "bfloat16": 1.40,
    "float16": 1.12,
    "float32": 1.165,
    "fp8": 1.10,
    "fp8_e4m3": 1.10,
    "fp8_e5m2": 1.27,
}
# Of a key: its entry in the table of keys, its object, and the heads of two strings.
_ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredPart:
    """packed_bytes: the payload as stored. memory_bytes: counted by the server, for maxmemory."""

    part_bytes: int
    packed_bytes: int
    stripes: int
    value_bytes: int
    memory_bytes: int


def stored_part(part_bytes: int, slot_bytes: int, model: str, ratio: float = 1.0) -> StoredPart:
    """A part as agents store it. ratio: of its bytes to those that they pack each stripe into.

    Raises FormatError for a size that is not positive.
    """
    payload = stripe_payload_bytes(part_bytes, slot_bytes)
    stripes = -(-part_bytes // payload)
    last = part_bytes - (stripes - 1) * payload
    payloads = [math.ceil(each / ratio) for each in [payload] * (stripes - 1) + [last]]
    stem = key_stem(bytes(NAMESPACE_BYTES), model, 0, len(_HASH))
    key = len(stripe_key(stem + hash_tag(_HASH), 0))
    packed, headers = sum(payloads), stripes * HEADER_BYTES
    memory = sum(allocated_bytes(each + HEADER_BYTES) for each in payloads)
    memory += stripes * (allocated_bytes(key) + _ENTRY_BYTES)
    return StoredPart(part_bytes, packed, stripes, packed + headers, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Options of vLLM and of the agent that change sizes, and what is asked.

    tp: ranks of tensor parallelism. kv_cache_dtype, state_dtype: vLLM's --kv-cache-dtype and
    --mamba-ssm-cache-dtype. step_tokens: the most tokens that one step of the prefill computes; a
    state is kept at its end. compress: agents pack without loss. memory_bytes: of a server.
    prompt_tokens: of a usual prompt.
    """

    tp: int = 1
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    step_tokens: int = 8192
    chunk_size_tokens: int = 256
    compress: bool = False
    memory_bytes: int = 64 << 30
    prompt_tokens: int = 8192
    prefill_tokens_per_s: float = 8000.0


@dataclass(frozen=True, slots=True)
class SizedGroup:
    """Layers that need the same blocks of a prefix.

    kind: attention, MLA or state. bytes_per_token: of keys and values, each counted once, and
    engine_bytes_per_token: in all ranks. state_bytes: of one state in all ranks. shards: how many
    parts a chunk has, of ranks that hold different bytes. ratio: of their bytes to the stored ones.
    part: one of them. stored_chunks, loaded_chunks: of the prompt; a state is kept once a step, and
    a hit loads the end of a window.
    """

    kind: str
    reach: Reach
    layers: int
    bytes_per_token: int
    engine_bytes_per_token: int
    state_bytes: int
    shards: int
    ratio: float
    part: StoredPart
    stored_chunks: int
    loaded_chunks: int

    @property
    def chunk_bytes(self) -> int:
        """The payload that each chunk has of it."""
        return self.shards * self.part.part_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The KV cache of a model in engines with these options, and of a prompt of theirs."""

    model: str
    model_type: str
    types: ElementTypes
    options: SizeOptions
    chunk_tokens: int
    groups: tuple[SizedGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token, in all layers; states are not in it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def state_bytes(self) -> int:
        return sum(group.state_bytes for group in self.groups)

    @property
    def engine_bytes_per_token(self) -> int:
        """In the memory of all ranks together, where several may hold the same."""
        return sum(group.engine_bytes_per_token for group in self.groups)

    @property
    def chunks(self) -> int:
        """The chunks of the prompt."""
        return self.options.prompt_tokens // self.chunk_tokens

    @property
    def payload_bytes(self) -> int:
        """Keys, values and states of the prompt."""
        return sum(group.stored_chunks * group.chunk_bytes for group in self.groups)

    @property
    def packed_bytes(self) -> int:
        """The same as they are stored."""
        return sum(g.stored_chunks * g.shards * g.part.packed_bytes for g in self.groups)

    @property
    def stored_bytes(self) -> int:
        """The server's memory for the prompt: what is stored, and headers, keys and rounding."""
        return sum(g.stored_chunks * g.shards * g.part.memory_bytes for g in self.groups)

    @property
    def loaded_bytes(self) -> int:
        """What a hit of the whole prompt loads."""
        return sum(group.loaded_chunks * group.chunk_bytes for group in self.groups)

    @property
    def prompts(self) -> int:
        """How many prompts fit into the memory, none of which share a prefix."""
        return self.options.memory_bytes // max(1, self.stored_bytes)

    @property
    def tokens(self) -> int:
        """How many tokens fit into the memory."""
        tokens = self.options.memory_bytes * self.chunks * self.chunk_tokens
        return tokens // max(1, self.stored_bytes)

    @property
    def loaded_bytes_per_token(self) -> float:
        """What the link carries for a token of a hit."""
        sent = sum(g.loaded_chunks * g.shards * g.part.packed_bytes for g in self.groups)
        return sent / max(1, self.chunks * self.chunk_tokens)

    @property
    def break_even_bytes_per_s(self) -> float:
        """Bytes per second at which a hit takes as long as computing its tokens."""
        return self.loaded_bytes_per_token * self.options.prefill_tokens_per_s

    @property
    def saved_by_windows(self) -> int:
        """Bytes that a hit of the prompt need not load, because windows end."""
        tokens = self.chunks * self.chunk_tokens
        ended = [group for group in self.groups if group.reach.tokens]
        return sum(g.bytes_per_token * tokens - g.loaded_chunks * g.chunk_bytes for g in ended)

    @property
    def saved_by_states(self) -> int:
        """As `saved_by_windows`, had recurrent layers as large keys as the attention layers."""
        states = [group for group in self.groups if group.state_bytes]
        attention = sum(group.layers for group in self.groups if not group.state_bytes)
        as_attention = sum(g.layers for g in states) * self.bytes_per_token // max(1, attention)
        loaded = sum(group.loaded_chunks * group.chunk_bytes for group in states)
        return max(0, as_attention * self.chunks * self.chunk_tokens - loaded)


def size_model(config: Mapping[str, Any], name: str, options: SizeOptions) -> ModelSize:
    """The size of a model by its config. name: of the model, in keys and errors.

    Raises ConfigError for a model that is not known, and if prompts are shorter than a chunk.
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
    chunks = options.prompt_tokens // chunk_tokens
    steps = -(-options.prompt_tokens // options.step_tokens)
    groups = []
    for reach, some in alike.items():
        blocks = reach.blocks_per_part(chunk_tokens // block_tokens, block_tokens)
        token_bytes = [layer.token_bytes(types) for layer in some]
        copies = [layer.copies(options.tp) for layer in some]
        on_ranks = sum(map(operator.mul, token_bytes, copies))
        state_bytes = sum(layer.state_bytes(types, options.tp) for layer in some)
        part_bytes = (on_ranks * blocks * block_tokens or state_bytes) // options.tp
        # Pages of several kinds of numbers, and states, may stay as they are.
        is_alike = not state_bytes and not any(layer.extra_bytes for layer in some)
        is_packed = options.compress and is_alike
        ratio = EXPECTED_RATIO.get(types.kv, 1.0) if is_packed else 1.0
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
                ratio=ratio,
                part=stored_part(part_bytes, DEFAULT_SLOT_BYTES, name, ratio),
                stored_chunks=min(chunks, steps) if state_bytes else chunks,
                loaded_chunks=chunks - reach.first_chunk(chunks, chunk_tokens),
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
