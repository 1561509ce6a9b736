"""How large the KV cache of a model is: of a token, of a chunk, in a memory, on a link. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_redis.admin.sizes.layers import ElementTypes
from lmcache_redis.admin.sizes.stored import StoredPart
from lmcache_redis.chunks.names import Reach
from lmcache_redis.config import DEFAULT_SLOT_BYTES


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of vLLM and of the agent that change sizes. tp: ranks of tensor parallelism.

    kv_cache_dtype, state_dtype: vLLM's --kv-cache-dtype and --mamba-ssm-cache-dtype. step_tokens:
    the most tokens that one step of the prefill computes; a state is kept at its end.
    """

    tp: int = 1
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    step_tokens: int = 8192
    chunk_size_tokens: int = 256
    slot_bytes: int = DEFAULT_SLOT_BYTES


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

    @property
    def chunk_memory_bytes(self) -> int:
        return self.shards * self.part.memory_bytes

    def loaded_bytes(self, chunks: int, chunk_tokens: int) -> int:
        """What a hit of so many chunks loads."""
        needed = chunks - self.reach.first_chunk(chunks, chunk_tokens)
        return needed * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The KV cache of a model in engines with these options."""

    model: str
    model_type: str
    types: ElementTypes
    options: EngineOptions
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

    def chunks(self, prompt_tokens: int) -> int:
        return prompt_tokens // self.chunk_tokens

    def payload_bytes(self, prompt_tokens: int) -> int:
        """Keys, values and states of a prompt, as stored."""
        return sum(self._parts(group, prompt_tokens) * group.chunk_bytes for group in self.groups)

    def stored_bytes(self, prompt_tokens: int) -> int:
        """The server's memory for a prompt: its payload, and headers, keys and rounding."""
        return sum(
            self._parts(group, prompt_tokens) * group.chunk_memory_bytes for group in self.groups
        )

    def _parts(self, group: SizedGroup, prompt_tokens: int) -> int:
        """How many chunks of a prompt have a part of the group: one a step has a state."""
        chunks = self.chunks(prompt_tokens)
        steps = -(-prompt_tokens // self.options.step_tokens)
        return min(chunks, steps) if group.state_bytes else chunks

    def loaded_bytes(self, prompt_tokens: int) -> int:
        """What a hit of the whole prompt loads."""
        chunks = self.chunks(prompt_tokens)
        return sum(group.loaded_bytes(chunks, self.chunk_tokens) for group in self.groups)

    def prompts_in(self, memory_bytes: int, prompt_tokens: int) -> int:
        """How many prompts of this length fit, none of which share a prefix."""
        return memory_bytes // max(1, self.stored_bytes(prompt_tokens))

    def tokens_in(self, memory_bytes: int, prompt_tokens: int) -> int:
        stored = self.stored_bytes(prompt_tokens)
        return memory_bytes * self.chunks(prompt_tokens) * self.chunk_tokens // max(1, stored)

    def break_even_bytes_per_s(self, prefill_tokens_per_s: float, prompt_tokens: int) -> float:
        """Bytes per second at which a hit takes as long as computing its tokens."""
        tokens = self.chunks(prompt_tokens) * self.chunk_tokens
        return self.loaded_bytes(prompt_tokens) * prefill_tokens_per_s / max(1, tokens)

    def saved_by_windows(self, prompt_tokens: int) -> int:
        """Bytes that a hit of the prompt need not load, because windows end."""
        chunks = self.chunks(prompt_tokens)
        return sum(
            group.bytes_per_token * chunks * self.chunk_tokens
            - group.loaded_bytes(chunks, self.chunk_tokens)
            for group in self.groups
            if group.reach.tokens
        )

    def saved_by_states(self, prompt_tokens: int) -> int:
        """As `saved_by_windows`, had recurrent layers as large keys as the attention layers."""
        attention = [group for group in self.groups if not group.state_bytes]
        states = [group for group in self.groups if group.state_bytes]
        layers = sum(group.layers for group in attention)
        if not layers or not states:
            return 0
        chunks = self.chunks(prompt_tokens)
        as_attention = sum(group.layers for group in states) * self.bytes_per_token / layers
        loaded = sum(group.loaded_bytes(chunks, self.chunk_tokens) for group in states)
        return int(as_attention * chunks * self.chunk_tokens) - loaded
