# SPDX-License-Identifier: Apache-2.0
"""Which engines can be cached, decided at startup by their settings and the kinds of their layers.

A reason against it is one sentence. vLLM versions differ in the settings that they have, hence the
defaults; specs of layers are told apart by the names of their classes. vLLM groups layers that
share block ids: full attention needs every block of a prefix, a sliding window the last ones, a
recurrent layer one state.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.config import ClientConfig
from lmcache_redis.errors import LMCacheRedisError, Unsupported
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.making import is_of_an_engine

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logging.getLogger("vllm.lmcache_redis")

_HASHES = ("sha256", "sha256_cbor")
_DEVICES = ("cpu", "cuda")
# Settings that give some layers another number of KV heads; the last two in parts that are of some
# layers alone (Nemotron, Step-3.5). Gemma's `num_kv_shared_layers` counts layers.
_KV_HEADS = re.compile(
    r"k(ey_?)?v(alue)?_heads|multi_query_group|num_kv(?!_shared_layers)|n_heads_in_group|"
    r"num_attention_groups"
)
_ENCODERS = ("vision", "audio")
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec")
_WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CACHED_STATES = ("align", "all")


@dataclass(frozen=True)
class LayerGroup:
    """One of vLLM's KV cache groups. number: vLLM's; the agent counts those that are cached."""

    number: int
    layers: tuple[str, ...]
    block_size_tokens: int
    reach: Reach

    @property
    def is_state(self) -> bool:
        """Whether a block holds the state after its last token instead of its tokens' KV."""
        return self.reach.kind == "state"

    def part(self, chunk: int, chunk_tokens: int) -> slice:
        """Which of a request's blocks the part of chunk number ``chunk`` holds."""
        blocks = chunk_tokens // self.block_size_tokens
        end = (chunk + 1) * blocks
        return slice(end - self.reach.blocks_per_part(blocks, self.block_size_tokens), end)


def supported_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, takes_failed_loads: bool
) -> list[LayerGroup]:
    """The groups of the engine's layers. Raises `Unsupported` if the engine cannot be cached.

    takes_failed_loads: whether this vLLM is told which requests' loads failed.
    """
    groups = layer_groups(kv_cache_config)
    for reason in _reasons(vllm_config, groups):
        raise Unsupported(reason)
    several = len(kv_cache_config.kv_cache_groups) > 1
    if not takes_failed_loads and (several or groups[0].reach != FULL_REACH):
        raise Unsupported(
            "the model has several KV cache groups or drops blocks, and this vLLM version does not "
            "let connectors report failed loads of such models; vLLM 0.30 or newer does"
        )
    return groups


def _reasons(vllm_config: VllmConfig, groups: Sequence[LayerGroup]) -> Iterator[str]:
    if not groups:
        yield "the model has no KV cache"
    step = vllm_config.cache_config.block_size
    for group in groups:
        # vLLM ends the steps of a prefill where a block of ``step`` tokens ends.
        if group.is_state and group.block_size_tokens != step:
            every = f"every {group.block_size_tokens} tokens, and vLLM ends its steps every {step}"
            yield f"KV cache group {group.number} keeps states {every}"
    parallel = vllm_config.parallel_config
    for need in (needs.DCP_SIZE, needs.PCP_SIZE):
        if (size := need.of(parallel)) > 1:
            yield f"{need.name} is {size}: the tokens of a request are spread over ranks"
    ranks = needs.WORLD_SIZE.of(parallel)
    if needs.EXECUTOR_BACKEND.of(parallel) == "external_launcher" and ranks > 1:
        yield "with external_launcher the ranks would not learn of hits in the same step"
    yield from unfit_settings(vllm_config)
    device = _device(vllm_config) or "cpu"
    # vLLM has no sleep mode on CPUs: a worker there ignores it.
    sleeps = device == "cuda" and needs.SLEEP_MODE.of(vllm_config.model_config)
    if sleeps and not needs.UNREGISTER.is_in(KVConnectorBase_V1):
        yield "sleep mode unmaps the KV cache and does not say so: it needs vLLM 0.33 or newer"
    if device not in _DEVICES:
        yield f"the engine runs on {device}; this version handles {' and '.join(_DEVICES)}"
    elif device == "cuda" and torch.version.hip:
        yield "the engine runs on ROCm, on which this version has never been run"


def _device(vllm_config: VllmConfig) -> str:
    return str(needs.DEVICE_TYPE.of(needs.DEVICE_CONFIG.of(vllm_config)))


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """The order of the KV cache in memory that the engine asks vLLM for.

    vLLM would end for a name that it does not know, and if children of a MultiConnector differ. Its
    MLA on a CPU ends with the first prompt, unless the blocks of a layer are one piece.
    """
    assert vllm_config.kv_transfer_config is not None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    try:
        layout = ClientConfig.from_extra_config(extra).kv_cache_layout
    except LMCacheRedisError:
        return None  # it is reported where the cache stays off
    layouts = needs.LAYOUTS.load()
    is_known = layouts is not None and layout in layouts.__members__
    if _device(vllm_config) == "cpu" and needs.USE_MLA.of(vllm_config.model_config):
        return None
    return layout if is_known and is_of_an_engine(vllm_config) else None


def unfit_settings(vllm_config: VllmConfig) -> Iterator[str]:
    """Why KV must not be cached by its block hash, whoever moves it: a sentence for each."""
    cache = vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in _HASHES:
        yield f"block hashes made with {algorithm}: set --prefix-caching-hash-algo sha256"
    elif "PYTHONHASHSEED" not in os.environ and not needs.HASH_SEED.is_in(kv_cache_utils):
        yield "block hashes differ between engines: give all of them the same PYTHONHASHSEED"
    block_size = cache.block_size or 0
    hashed = needs.CONFIG_HASH_BLOCK.of(cache) or needs.PREFIX_MATCH_UNIT.of(cache)
    if block_size < 1 or block_size % (hashed or block_size):
        yield f"a block has {block_size} tokens and a block hash covers {hashed or block_size}"
    model = vllm_config.model_config
    if needs.ENCODER_DECODER.of(model):
        yield "encoder-decoder models are not handled"
    elif needs.DIFFUSION.of(model):
        yield "a diffusion model writes the KV of a token more than once"
    elif not needs.PREFIX_CACHING.of(model):
        yield "vLLM does not support prefix caching for this model"
    scheduler = needs.SCHEDULER_SETTINGS.of(vllm_config)
    if (
        _device(vllm_config) == "cpu"
        and needs.USE_MLA.of(model)
        and not needs.CHUNKED_PREFILL.of(scheduler)
    ):
        yield "vLLM's MLA on a CPU without AMX cannot continue after a cached prefix"
    if needs.KV_SCALES.of(cache) and str(cache.cache_dtype).startswith("fp8"):
        yield "with --calculate-kv-scales the KV depends on the first prompt"
    simulation = needs.ROUTING_SIMULATION
    if strategy := simulation.of(envs):
        yield f"with {simulation.name}={strategy}, experts are chosen by a simulation"


def may_load(vllm_config: VllmConfig) -> bool:
    """Whether the engine may load prefixes, and not only store them."""
    auxiliary = needs.AUX_OUTPUT_CONFIG.of(vllm_config)
    model = vllm_config.model_config
    if not (needs.AUX_EXPERTS.of(auxiliary) or needs.ROUTED_EXPERTS.of(model)):
        return True
    logger.warning(
        "with --enable-return-routed-experts prefixes are stored and not loaded: a loaded prefix "
        "has no experts"
    )
    return False


def adapters_only(vllm_config: VllmConfig) -> bool:
    """Whether prompts without an adapter are not cached.

    Before 0.33, vLLM on a CPU computes such a prompt, in a batch with adapters, with the adapter in
    the last place.
    """
    if needs.LORA_CONFIG.of(vllm_config) is None or _device(vllm_config) == "cuda":
        return False
    try:
        output, one, none = torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([-1])
        needs.BGMV_EXPAND.load()(one, one.unsqueeze(0), output, none, add_inputs=True)
        if not output.any():
            return False
    except Exception:  # whatever another vLLM has there
        logger.debug("it cannot be seen what no adapter is computed with", exc_info=True)
    logger.warning(
        "prompts without an adapter are not cached: beside some with one, this vLLM computes them "
        "with an adapter on a CPU; 0.33 or newer does not"
    )
    return True


def layer_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """The groups that are cached. Raises `Unsupported` for one that cannot be."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not _is_part_of_prefixes(spec):
            continue
        inner = _inner_specs(spec)
        # Reasons come first.
        reach, *others = sorted({*map(_reach, inner)}, key=lambda each: isinstance(each, Reach))
        if needs.HOST_RESIDENT.of(group) or not needs.KV_TRANSFER.of(group):
            reach = "vLLM does not let connectors load it"
        elif others and isinstance(reach, Reach):
            reach = "its layers need different blocks"
        if isinstance(reach, str):
            names = " and ".join(sorted({type(each).__name__ for each in inner}))
            raise Unsupported(f"KV cache group {number} ({names}): {reach}")
        layers = tuple(needs.LAYER_NAMES.of(group))
        groups.append(LayerGroup(number, layers, int(spec.block_size), reach))
    return groups


def left_out_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """The groups that vLLM computes again: windows that are replayed, and buffers of a request."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not _is_part_of_prefixes(spec):
            first, *_ = _inner_specs(spec)
            reach = _reach(first)
            # A circular buffer is one block, however many tokens pass through it.
            is_buffer = type(first).__name__ == "CircularBufferSpec"
            block_size = sys.maxsize if is_buffer else spec.block_size
            if not isinstance(reach, Reach):
                reach = FULL_REACH
            groups.append(LayerGroup(number, tuple(group.layer_names), block_size, reach))
    return groups


def shard_of_rank(vllm_config: VllmConfig, spec: KVCacheSpec) -> tuple[int, int, int]:
    """``(shard, shards, replicas)`` of this rank's bytes of a group.

    Ranks whose shards are equal hold the same bytes; there are ``replicas`` of them, with
    consecutive numbers. Under tensor parallelism every rank holds the whole latent of MLA, and a
    model with fewer KV heads than ranks gives each head to several ranks.
    """
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    heads = total_kv_heads(vllm_config.model_config)
    replicas = math.gcd(*(_replicas(each, size, heads) for each in _inner_specs(spec)))
    return parallel.rank // replicas, parallel.world_size // replicas, replicas


def _replicas(spec: Any, size: int, total_kv_heads: int | None) -> int:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return size if needs.TP_REPLICATED.of(spec) else 1
    shards: int | None = needs.MAX_TP_SHARDS.of(spec)
    if shards is None and "MLA" in kind:
        shards = 1
    elif shards is None and needs.SPEC_KV_HEADS.of(spec) == 1:
        shards = total_kv_heads
    return size // shards if shards and size % shards == 0 else 1


def has_heads(spec: Any) -> bool:
    """Whether the ranks of a group divide its bytes by KV head: not latents, nor states."""
    kinds = [type(each).__name__ for each in _inner_specs(spec)]
    return not any("MLA" in kind or kind == "MambaSpec" for kind in kinds)


def total_kv_heads(model: ModelConfig) -> int | None:
    """KV heads of every layer, over all ranks; None if layers may differ."""
    total = model.get_total_num_kv_heads()
    counts = _kv_heads_in(model.hf_text_config.to_dict())
    return total if all(count in (None, total) for count in counts) else None


def _kv_heads_in(config: object) -> Iterator[object]:
    """What a configuration says of KV heads, also of some layers alone."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if _KV_HEADS.search(str(name)):
                yield value
            elif not str(name).startswith(_ENCODERS):
                yield from _kv_heads_in(value)
    elif isinstance(config, (list, tuple)):
        for each in config:
            yield from _kv_heads_in(each)


def block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Bytes between blocks, by layer; empty if this vLLM leaves them to the tensors' strides."""
    tensors = kv_cache_config.kv_cache_tensors
    stride, layers = needs.BLOCK_STRIDE, needs.TENSOR_LAYERS
    if not all(stride.is_in(tensor) and layers.is_in(tensor) for tensor in tensors):
        return {}
    return {layer: stride.of(tensor) for tensor in tensors for layer in layers.of(tensor)}


def _reach(spec: Any) -> Reach | str:
    """The reach of a layer's spec, or why the layer cannot be cached."""
    kind = type(spec).__name__
    if kind in _FULL:
        return FULL_REACH
    if kind in _WINDOWS:
        return Reach("window", spec.sliding_window + needs.EXTRA_RETAINED.of(spec))
    if kind == "ChunkedLocalAttentionSpec":
        return Reach("local", spec.attention_chunk_size)
    if kind == "MambaSpec":
        if spec.mamba_cache_mode in _CACHED_STATES:
            return Reach("state")
        return (
            f"states are not kept (mamba_cache_mode is {spec.mamba_cache_mode!r}): start vLLM with "
            "--enable-prefix-caching --mamba-cache-mode align"
        )
    return "this version does not handle this kind"


def _inner_specs(spec: Any) -> Sequence[Any]:
    """The specs of a group's layers, where they may differ."""
    return [*needs.INNER_SPECS.of(spec).values()] or [spec]


def _is_part_of_prefixes(spec: Any) -> bool:
    return bool(needs.PREFIX_CACHEABLE.of(spec))
