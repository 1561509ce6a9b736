# SPDX-License-Identifier: Apache-2.0
"""What the config.json of a model says of its layers, for each model type that is known.

The sizes are those of vLLM's own KV cache specs: tests/integrations/test_sizes.py builds the models
without weights and compares. A type that is not here is an error, never a guess.

Attention keeps keys and values of each token, or one latent vector (MLA), which every rank of
tensor parallelism holds whole. A recurrent layer keeps a state, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import ConfigError

STATE_REACH = Reach("state")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# An 8-bit latent of 512 with scales, and a bfloat16 rotary part of 64 (FlashMLA).
PACKED_LATENT, _PACKED_BYTES, _PACKED_VALUES = "fp8_ds_mla", 656, 576
KV_DTYPES = ("auto", *DTYPE_BYTES, PACKED_LATENT)
# Where models for images, sound and text keep the config of the text model.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
UNKNOWN = (
    "start vLLM with it, and see the bytes of its chunks in `lmcache-redis inspect`, or tell "
    "doctor by --kv-bytes-per-token"
)
# Words of configs for the kinds of layers.
_FULL, _WINDOW, _LOCAL, _STATE, _NOTHING = "full", "window", "local", "state", "nothing"
_WORDS = {
    **dict.fromkeys(("full_attention", "attention", "*"), _FULL),
    "sliding_attention": _WINDOW,
    "chunked_attention": _LOCAL,
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M"), _STATE),
    **dict.fromkeys(("moe", "mlp", "-", "E"), _NOTHING),
}


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
                f"--tp {ranks}: vLLM cannot share {self.heads} KV heads among {ranks} ranks"
            )
        return ranks // fewer

    def state_bytes(self, types: ElementTypes, ranks: int) -> int:
        """The state on all ranks together. Raises ConfigError if they cannot share it."""
        groups = self.groups if self.groups % ranks == 0 else ranks
        conv = self.conv + groups * self.group_conv
        if conv % ranks or self.recurrent % ranks:
            raise ConfigError(f"--tp {ranks}: vLLM cannot share the states among {ranks} ranks")
        recurrent_type = types.recurrent
        if recurrent_type == "auto":
            recurrent_type = self.recurrent_type or types.conv
        return conv * DTYPE_BYTES[types.conv] + self.recurrent * DTYPE_BYTES[recurrent_type]


# ------------------------------------------------------------------- the config


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a text model's config. where: names the file in errors."""

    given: Mapping[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not null; None if none is."""
        found = (self.given[name] for name in names if self.given.get(name) is not None)
        return next(found, None)

    def need(self, *names: str) -> Any:
        """As `get`. Raises ConfigError, which names the field, if none is there."""
        found = self.get(*names)
        if found is None:
            raise ConfigError(f"{self.where} does not say {names[0]}: {UNKNOWN}")
        return found

    def number(self, *names: str) -> int:
        """A positive whole number. Raises ConfigError."""
        found = self.need(*names)
        if type(found) is not int or found <= 0:
            raise ConfigError(f"{self.where}: {names[0]} is {found!r}, not a positive whole number")
        return found

    def merged(self, other: Mapping[str, Any]) -> Fields:
        """With the fields of another, which take precedence."""
        return Fields({**self.given, **other}, self.where)


def text_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The fields of the text model: of the config, or of the one inside it."""
    *outer, inner = _nested(config)
    # What the inner one leaves out, such as the dtype, holds for the whole model.
    dtypes = [each.get("dtype") or each.get("torch_dtype") for each in (*outer, inner)]
    return Fields({**inner, "dtype": next(filter(None, reversed(dtypes)), None)}, where)


def _nested(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in _TEXT_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield from _nested(config[name])
            return


# --------------------------------------------------------------------- the families


def layers_of(fields: Fields) -> list[Layer]:
    """The layers that keep something. Raises ConfigError, also for a type that is not known."""
    kind = fields.get("model_type")
    if str(kind) not in FAMILIES:
        raise ConfigError(
            f"{fields.where}: the model type {kind!r} is not one whose KV cache this version can "
            f"tell: {UNKNOWN}"
        )
    read, defaults = FAMILIES[str(kind)]
    # A field that is null is left out on purpose.
    layers = list(read(Fields({**defaults, **fields.given}, fields.where)))
    if not layers:
        raise ConfigError(f"{fields.where} has no layer that keeps anything: {UNKNOWN}")
    return layers


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, as the config lists them, else as a pattern of it says."""
    words = fields.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    count = len(words) if fields.get("hybrid_override_pattern") else fields.get("num_hidden_layers")
    if words is not None:
        unknown = sorted({str(word) for word in words} - _WORDS.keys())
        if unknown:
            raise ConfigError(
                f"{fields.where} has layers of an unknown kind, {unknown[0]!r}: {UNKNOWN}"
            )
        return [_WORDS[word] for word in words][:count]
    other = fields.get("other_layers")
    every = fields.get("sliding_window_pattern", "_sliding_window_pattern", "every")
    if other is None or every is None:
        return [_FULL] * fields.number("num_hidden_layers")
    if isinstance(every, str):
        every = len(every)
    return [
        _FULL if (at + 1) % every == 0 else other
        for at in range(fields.number("num_hidden_layers"))
    ]


def _state(conv: int, recurrent: int, **more: Any) -> Layer:
    return Layer(reach=STATE_REACH, conv=conv, recurrent=recurrent, **more)


def _attention(fields: Fields, kind: str = _FULL) -> Layer:
    reach = FULL_REACH
    if kind == _WINDOW:
        reach = Reach("window", fields.number("sliding_window") + (fields.get("one_more") or 0))
    elif kind == _LOCAL:
        reach = Reach("local", fields.number("attention_chunk_size"))
    head_dim = fields.get("head_dim")
    if head_dim is None:
        head_dim = fields.number("hidden_size") // fields.number("num_attention_heads")
    return Layer(reach=reach, heads=fields.number("num_key_value_heads"), values=2 * head_dim)


def _plain(fields: Fields) -> Iterator[Layer]:
    """Attention only: full, in windows, or both."""
    kinds = _kinds(fields)
    if len(set(kinds)) == 1:
        # vLLM then has one window for all layers, whatever they are called.
        has_window = fields.get("sliding_window") and fields.get("use_sliding_window") is not False
        kinds = [_WINDOW if has_window else _FULL] * len(kinds)
    overrides = fields.get("per_layer_config") or {}
    of_layer = {int(number): override for number, override in overrides.items()}
    for at, kind in enumerate(kinds):
        yield _attention(fields.merged(of_layer.get(at, {})), kind)


def _gemma4(fields: Fields) -> Iterator[Layer]:
    """Full layers have larger heads, and the last layers use the keys of those before."""
    fields.need("layer_types")
    kinds = _kinds(fields)
    if not fields.get("per_layer_config"):
        full = {"head_dim": fields.get("global_head_dim") or 512}
        if fields.get("attention_k_eq_v") and (heads := fields.get("num_global_key_value_heads")):
            full["num_key_value_heads"] = heads
        of_layer = {at: full for at, kind in enumerate(kinds) if kind == _FULL}
        fields = fields.merged({"per_layer_config": of_layer})
    own = len(kinds) - (fields.get("num_kv_shared_layers") or 0)
    yield from islice(_plain(fields), own)


def _llama4(fields: Fields) -> Iterator[Layer]:
    rotary = fields.get("no_rope_layers")
    if rotary and not fields.get("layer_types"):
        kinds = ["chunked_attention" if each else "full_attention" for each in rotary]
        fields = fields.merged({"layer_types": kinds})
    has_chunks = fields.get("attention_chunk_size")
    for kind in _kinds(fields):
        yield _attention(fields, kind if has_chunks else _FULL)


def _latent(fields: Fields) -> Iterator[Layer]:
    """MLA. With an index of its own (DeepSeek-V3.2) a layer also keeps 8-bit keys and scales."""
    values = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    index_dim = fields.get("index_head_dim") if fields.get("index_topk") else None
    index_bytes = index_dim + index_dim // 128 * 4 if index_dim else 0
    for at in range(fields.number("num_hidden_layers")):
        own = 0 if _shares_index(fields, at) else index_bytes
        yield Layer(heads=1, values=values, latent=True, extra_bytes=own)


def _shares_index(fields: Fields, layer: int) -> bool:
    """Whether it uses the index of a layer before it."""
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        return layer < len(pattern) and bool(pattern[layer] == "S")
    every = fields.get("index_topk_freq") or 1
    offset = fields.given.get("index_skip_topk_offset", 2)
    return bool(max(layer - offset + 1, 0) % every)


def _hybrid(state: Callable[[Fields], Layer]) -> Callable[[Fields], Iterator[Layer]]:
    """Attention beside layers that keep a state."""

    def read(fields: Fields) -> Iterator[Layer]:
        if not fields.get("every"):
            fields.need("layer_types", "layers_block_type", "hybrid_override_pattern")
        for kind in _kinds(fields):
            if kind == _STATE:
                yield state(fields)
            elif kind != _NOTHING:
                yield _attention(fields, kind)

    return read


def _falcon_h1(fields: Fields) -> Iterator[Layer]:
    """Both in every layer."""
    for _ in range(fields.number("num_hidden_layers")):
        yield _attention(fields)
        yield _mamba2(fields)


def _gated_delta(fields: Fields) -> Layer:
    keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
    values = fields.number("linear_num_value_heads") * fields.number("linear_value_head_dim")
    past = fields.number("linear_conv_kernel_dim") - 1
    return _state(
        (2 * keys + values) * past,
        values * fields.number("linear_key_head_dim"),
        recurrent_type=fields.get("mamba_ssm_dtype"),
    )


def _mamba2(fields: Fields) -> Layer:
    heads = fields.number("mamba_n_heads", "mamba_num_heads")
    state = fields.number("mamba_d_state", "ssm_state_size")
    past = fields.number("mamba_d_conv", "conv_kernel") - 1
    head_dim, inner = fields.get("mamba_d_head", "mamba_head_dim"), fields.get("mamba_d_ssm")
    if head_dim in (None, "auto"):
        head_dim = (inner or fields.number("mamba_expand") * fields.number("hidden_size")) // heads
    return _state(
        (inner or heads * head_dim) * past,
        heads * head_dim * state,
        groups=fields.number("mamba_n_groups", "n_groups"),
        group_conv=2 * state * past,
        recurrent_type=fields.get("mamba_ssm_cache_dtype"),
    )


def _short_conv(fields: Fields) -> Layer:
    width = fields.get("conv_dim") or fields.number("hidden_size")
    return _state(width * (fields.number("conv_L_cache") - 1), 0)


def _every(number: int, other: str, **more: Any) -> dict[str, Any]:
    """One full layer in each group of this size: the last one."""
    return {"every": number, "other_layers": other, **more}


_GEMMA3 = _every(
    6, _WINDOW, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096
)
_HEADS_OF_128 = {"head_dim": 128}

# How the fields of these model types are read, and the values of fields that are left out.
_BY_FAMILY: list[tuple[str, Callable[[Fields], Iterator[Layer]], Mapping[str, Any]]] = [
    (
        "llama mixtral qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text phi3 "
        "phimoe olmo olmo2 olmoe cohere granite granitemoe stablelm starcoder2 ernie4_5_moe "
        "glm4_moe smollm3 nemotron qwen3_vl_moe_text",
        _plain, {},
    ),
    ("mistral", _plain, {"sliding_window": 4096}),
    (
        "qwen3 qwen3_moe qwen3_vl_text ernie4_5 glm4 minimax_m2 ministral3 seed_oss",
        _plain, _HEADS_OF_128,
    ),
    ("gemma", _plain, {"head_dim": 256}),
    ("gemma2", _plain, _every(2, _WINDOW, head_dim=256, sliding_window=4096)),
    ("gemma3_text", _plain, _GEMMA3),
    ("gemma4_text", _gemma4, {"head_dim": 256, "sliding_window": 512}),
    ("gpt_oss", _plain, _every(2, _WINDOW, head_dim=64, sliding_window=128)),
    ("olmo3 exaone4 exaone_moe", _plain, _every(4, _WINDOW, sliding_window=4096)),
    # Its windows include the token itself.
    ("cohere2", _plain, _every(4, _WINDOW, sliding_window=4096, one_more=1)),
    ("llama4_text", _llama4, _every(4, _LOCAL, head_dim=128)),
    ("deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite kimi_k2", _latent, {}),
    (
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        _hybrid(_gated_delta), _every(4, _STATE, head_dim=256),
    ),
    ("granitemoehybrid", _hybrid(_mamba2), {}),
    ("falcon_h1", _falcon_h1, {}),
    ("nemotron_h", _hybrid(_mamba2), {**_HEADS_OF_128, "mamba_ssm_cache_dtype": "float32"}),
    ("lfm2 lfm2_moe", _hybrid(_short_conv), {}),
]  # fmt: skip
FAMILIES = {name: (read, more) for names, read, more in _BY_FAMILY for name in names.split()}
