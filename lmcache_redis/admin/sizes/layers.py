"""A layer by what it keeps of a prompt, and how ranks share that. Pure.

Attention keeps keys and values of each token, or one latent vector (MLA), which every rank of
tensor parallelism holds whole. A recurrent layer keeps a state, however long the prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import ConfigError

STATE_REACH = Reach("state")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# An 8-bit latent of 512 with scales, and a bfloat16 rotary part of 64 (FlashMLA).
PACKED_LATENT, _PACKED_BYTES, _PACKED_VALUES = "fp8_ds_mla", 656, 576
KV_DTYPES = ("auto", *DTYPE_BYTES, PACKED_LATENT)


class ElementTypes(NamedTuple):
    """The types of what is kept: of keys and values, of a convolution's and of other states."""

    kv: str
    conv: str
    recurrent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """heads: KV heads, 0 for a state. values: elements of a token and head, keys and values.

    latent: MLA, one vector for all heads. extra_bytes: of a token, of a fixed type (an indexer).
    conv, recurrent: elements of a recurrent layer's two states over all ranks. groups, group_conv:
    elements of the convolution for each group of heads; ranks that share a group hold it several
    times. recurrent_type: if the config names one.
    """

    reach: Reach = FULL_REACH
    heads: int = 0
    values: int = 0
    latent: bool = False
    extra_bytes: int = 0
    conv: int = 0
    recurrent: int = 0
    groups: int = 0
    group_conv: int = 0
    recurrent_type: str | None = None

    def token_bytes(self, types: ElementTypes) -> int:
        """Of a token, each byte counted once, however many ranks hold it. Raises ConfigError."""
        if not self.heads:
            return 0
        if types.kv != PACKED_LATENT:
            own = self.heads * self.values * DTYPE_BYTES[types.kv]
        elif self.latent and self.values == _PACKED_VALUES:
            own = _PACKED_BYTES
        else:
            raise ConfigError(
                f"--kv-cache-dtype {PACKED_LATENT} is of models with MLA and a latent of "
                f"{_PACKED_VALUES}: give another one of {', '.join(KV_DTYPES)}"
            )
        return own + self.extra_bytes

    def copies(self, ranks: int) -> int:
        """How many ranks hold the same bytes. Raises ConfigError if they cannot share the heads."""
        if self.latent:
            return ranks
        if not self.heads:
            return 1
        more, fewer = max(self.heads, ranks), min(self.heads, ranks)
        if more % fewer:
            raise ConfigError(
                f"--tp {ranks}: vLLM cannot share {self.heads} KV heads among so many ranks"
            )
        return ranks // fewer

    def state_bytes(self, types: ElementTypes, ranks: int) -> int:
        """The state on all ranks together. Raises ConfigError if they cannot share it."""
        groups = self.groups if self.groups % ranks == 0 else ranks
        conv = self.conv + groups * self.group_conv
        if conv % ranks or self.recurrent % ranks:
            raise ConfigError(f"--tp {ranks}: vLLM cannot share the states among so many ranks")
        recurrent_type = types.recurrent
        if recurrent_type == "auto":
            recurrent_type = self.recurrent_type or types.conv
        return conv * DTYPE_BYTES[types.conv] + self.recurrent * DTYPE_BYTES[recurrent_type]
