"""How large the KV cache of a model is: of a token, of a chunk, in a memory, on a link. Pure.

Redis holds a part of a chunk as stripes, with headers, keys, and the server's share.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_redis.admin.sizes.layers import ElementTypes
from lmcache_redis.chunks.frame import HEADER_BYTES, allocated_bytes, stripe_payload_bytes
from lmcache_redis.chunks.keys import NAMESPACE_BYTES
from lmcache_redis.chunks.names import Reach, key_stem, stripe_key
from lmcache_redis.config import DEFAULT_SLOT_BYTES

# vLLM's block hashes are SHA-256.
_HASH = bytes(32)
# Of a key: its entry in the table of keys, its object, and the heads of two strings.
_ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredPart:
    """memory_bytes: what the server counts for it, towards its maxmemory."""

    part_bytes: int
    stripes: int
    value_bytes: int
    memory_bytes: int


def stored_part(part_bytes: int, slot_bytes: int, model: str) -> StoredPart:
    """A part as agents store it. Raises FormatError for a size that is not positive."""
    payload = stripe_payload_bytes(part_bytes, slot_bytes)
    stripes = -(-part_bytes // payload)
    last = part_bytes - (stripes - 1) * payload
    key = len(stripe_key(key_stem(bytes(NAMESPACE_BYTES), model, 0, len(_HASH)) + _HASH, 0))
    sizes = [payload + HEADER_BYTES] * (stripes - 1) + [last + HEADER_BYTES]
    memory = sum(map(allocated_bytes, sizes)) + stripes * (allocated_bytes(key) + _ENTRY_BYTES)
    return StoredPart(part_bytes, stripes, part_bytes + stripes * HEADER_BYTES, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Options of vLLM and of the agent that change sizes, and what is asked.

    tp: ranks of tensor parallelism. kv_cache_dtype, state_dtype: vLLM's --kv-cache-dtype and
    --mamba-ssm-cache-dtype. step_tokens: the most tokens that one step of the prefill computes; a
    state is kept at its end. memory_bytes: of a server. prompt_tokens: of a usual prompt.
    """

    tp: int = 1
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    step_tokens: int = 8192
    chunk_size_tokens: int = 256
    slot_bytes: int = DEFAULT_SLOT_BYTES
    memory_bytes: int = 64 << 30
    prompt_tokens: int = 8192
    prefill_tokens_per_s: float = 8000.0


@dataclass(frozen=True, slots=True)
class SizedGroup:
    """Layers that need the same blocks of a prefix.

    kind: attention, MLA or state. bytes_per_token: of keys and values, each counted once, and
    engine_bytes_per_token: in all ranks. state_bytes: of one state in all ranks. shards: how many
    parts a chunk has, of ranks that hold different bytes. part: one of them.
    """

    kind: str
    reach: Reach
    layers: int
    bytes_per_token: int
    engine_bytes_per_token: int
    state_bytes: int
    shards: int
    part: StoredPart

    @property
    def chunk_bytes(self) -> int:
        """The payload that each chunk has of it."""
        return self.shards * self.part.part_bytes

    def loaded_bytes(self, chunks: int, chunk_tokens: int) -> int:
        """What a hit of so many chunks loads."""
        return (chunks - self.reach.first_chunk(chunks, chunk_tokens)) * self.chunk_bytes


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
        """Of the prompt."""
        return self.options.prompt_tokens // self.chunk_tokens

    @property
    def payload_bytes(self) -> int:
        """Keys, values and states of the prompt, as stored."""
        return sum(self._parts(group) * group.part.part_bytes for group in self.groups)

    @property
    def stored_bytes(self) -> int:
        """The server's memory for the prompt: its payload, and headers, keys and rounding."""
        return sum(self._parts(group) * group.part.memory_bytes for group in self.groups)

    def _parts(self, group: SizedGroup) -> int:
        """How many parts of the group the prompt has; a state is kept once a step."""
        steps = -(-self.options.prompt_tokens // self.options.step_tokens)
        return group.shards * (min(self.chunks, steps) if group.state_bytes else self.chunks)

    @property
    def loaded_bytes(self) -> int:
        """What a hit of the whole prompt loads."""
        return sum(group.loaded_bytes(self.chunks, self.chunk_tokens) for group in self.groups)

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
        return self.loaded_bytes / max(1, self.chunks * self.chunk_tokens)

    @property
    def break_even_bytes_per_s(self) -> float:
        """Bytes per second at which a hit takes as long as computing its tokens."""
        return self.loaded_bytes_per_token * self.options.prefill_tokens_per_s

    @property
    def saved_by_windows(self) -> int:
        """Bytes that a hit of the prompt need not load, because windows end."""
        tokens = self.chunks * self.chunk_tokens
        return sum(
            group.bytes_per_token * tokens - group.loaded_bytes(self.chunks, self.chunk_tokens)
            for group in self.groups
            if group.reach.tokens
        )

    @property
    def saved_by_states(self) -> int:
        """As `saved_by_windows`, had recurrent layers as large keys as the attention layers."""
        states = [group for group in self.groups if group.state_bytes]
        state_layers = sum(group.layers for group in states)
        layers = sum(group.layers for group in self.groups) - state_layers
        if not layers or not states:
            return 0
        as_attention = state_layers * self.bytes_per_token / layers
        loaded = sum(group.loaded_bytes(self.chunks, self.chunk_tokens) for group in states)
        return int(as_attention * self.chunks * self.chunk_tokens) - loaded
