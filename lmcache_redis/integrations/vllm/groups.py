"""The groups of a model's layers: which blocks of each a prefix needs, and where a chunk's are.

vLLM groups layers that share block ids. Full attention needs every block of a prefix, a sliding
window the last ones, a recurrent layer one state. Spec classes are told apart by name, because
versions of vLLM differ in which they have.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import Unsupported

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from lmcache_redis.client.worker import TransferOp

# Settings that give some layers another number of KV heads.
_KV_HEADS = re.compile(r"k(ey_?)?v(alue)?_heads|multi_query_group|num_kv")
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
    kind: str

    @property
    def is_state(self) -> bool:
        """Whether a block holds the state after its last token instead of its tokens' KV."""
        return self.reach.kind == "state"

    def part(self, chunk: int, chunk_tokens: int) -> slice:
        """Which of a request's blocks the part of chunk number ``chunk`` holds."""
        blocks = chunk_tokens // self.block_size_tokens
        end = (chunk + 1) * blocks
        return slice(end - self.reach.blocks_per_part(blocks, self.block_size_tokens), end)

    def written_by(self, load: TransferOp) -> Sequence[int]:
        """The blocks that a load writes."""
        return load.block_ids[load.skip_first_n_tokens // self.block_size_tokens :]


def layer_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """The groups that are cached. Raises `Unsupported` for one that cannot be."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not _is_part_of_prefixes(spec):
            continue
        inner = _inner_specs(spec)
        reaches = {_reach(each) for each in inner.values()}
        names = " and ".join(sorted({type(each).__name__ for each in inner.values()}))
        wrong = sorted(each for each in reaches if isinstance(each, str))
        if not _is_transferred(group):
            wrong = ["vLLM does not let connectors load it"]
        elif len(reaches) > 1 and not wrong:
            wrong = ["its layers need different blocks"]
        if wrong:
            raise Unsupported(f"KV cache group {number} ({names}): {', '.join(wrong)}")
        (reach,) = reaches
        assert isinstance(reach, Reach)
        layers = tuple(getattr(group, "layer_names", ()))
        groups.append(LayerGroup(number, layers, int(spec.block_size), reach, names))
    return groups


def left_out_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """The groups that vLLM computes again: windows that are replayed, and buffers of a request."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not _is_part_of_prefixes(spec):
            first, *_ = _inner_specs(spec).values()
            kind, reach = type(first).__name__, _reach(first)
            # A circular buffer is one block, however many tokens pass through it.
            block_size = sys.maxsize if kind == "CircularBufferSpec" else spec.block_size
            if not isinstance(reach, Reach):
                reach = FULL_REACH
            groups.append(LayerGroup(number, tuple(group.layer_names), block_size, reach, kind))
    return groups


def shard_of_rank(vllm_config: VllmConfig, spec: KVCacheSpec) -> tuple[int, int, int]:
    """``(shard, shards, replicas)`` of this rank's bytes of a group.

    Ranks whose shards are equal hold the same bytes; there are ``replicas`` of them, with
    consecutive numbers. Under tensor parallelism every rank holds the whole latent of MLA, and a
    model with fewer KV heads than ranks gives each head to several ranks.
    """
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    heads = _total_kv_heads(vllm_config.model_config)
    replicas = math.gcd(*(_replicas(each, size, heads) for each in _inner_specs(spec).values()))
    return parallel.rank // replicas, parallel.world_size // replicas, replicas


def _replicas(spec: Any, size: int, total_kv_heads: int | None) -> int:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return size if getattr(spec, "tp_replicated", False) else 1
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None and "MLA" in kind:
        shards = 1
    elif shards is None and getattr(spec, "num_kv_heads", None) == 1:
        shards = total_kv_heads
    return size // shards if shards and size % shards == 0 else 1


def _total_kv_heads(model: ModelConfig) -> int | None:
    """KV heads of every layer, over all ranks; None if layers may differ."""
    config = model.hf_text_config.to_dict()
    counts = [value for name, value in config.items() if _KV_HEADS.search(name)]
    total = model.get_total_num_kv_heads()
    return total if all(count in (None, total) for count in counts) else None


def common_block_tokens(groups: Sequence[LayerGroup]) -> int:
    """The least common multiple of the groups' block sizes, in tokens."""
    return math.lcm(*(group.block_size_tokens for group in groups))


def block_strides(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Bytes between blocks, by layer; empty if this vLLM leaves them to the tensors' strides."""
    tensors = kv_cache_config.kv_cache_tensors
    if not all(hasattr(tensor, "block_stride") and hasattr(tensor, "layers") for tensor in tensors):
        return {}
    return {layer: tensor.block_stride for tensor in tensors for layer in tensor.layers}


def _reach(spec: Any) -> Reach | str:
    """The reach of a layer's spec, or why the layer cannot be cached."""
    kind = type(spec).__name__
    if kind in _FULL:
        return FULL_REACH
    if kind in _WINDOWS:
        return Reach("window", spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
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


def _inner_specs(spec: Any) -> dict[str, Any]:
    """The specs of a group's layers, where they may differ."""
    return getattr(spec, "kv_cache_specs", None) or {"": spec}


def _is_part_of_prefixes(spec: Any) -> bool:
    return bool(getattr(spec, "prefix_cacheable", True))


def _is_transferred(group: Any) -> bool:
    return getattr(group, "enable_kv_transfer", True) and not getattr(group, "host_resident", False)
