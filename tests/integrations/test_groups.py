# SPDX-License-Identifier: Apache-2.0
"""What a reach leaves over is what vLLM's own managers of KV caches leave over."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from transformers import LlamaConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.support import (
    block_strides,
    layer_groups,
    left_out_groups,
    shard_of_rank,
)

BLOCK = 16
ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
TOKENS = st.integers(1, 3000)


def full(block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **ATTENTION)


def window(tokens: int, extra: int = 0, block: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, sliding_window=tokens, extra_retained_tokens=extra, **ATTENTION
    )


def local(tokens: int, block: int = BLOCK) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **ATTENTION)


def state(block: int = BLOCK) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def replayed(tokens: int, block: int = BLOCK) -> SlidingWindowMLASpec:
    """Of DeepSeek-V4.1: vLLM computes a window again after a hit."""
    return SlidingWindowMLASpec(
        block_size=block, sliding_window=tokens, bounded_replay=True, **ATTENTION
    )


def ring(block: int = BLOCK) -> CircularBufferSpec:
    return CircularBufferSpec(block_size=block, **ATTENTION)


def has_field(spec: Any, name: str) -> bool:
    """Whether this version of vLLM has the field."""
    return any(each.name == name for each in fields(spec))


def groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{n}"])
            for n, spec in enumerate(specs)
        ]
    )


SPECS = st.one_of(
    st.just(full()),
    st.just(MLAAttentionSpec(block_size=BLOCK, **ATTENTION)),
    st.builds(window, TOKENS, st.integers(0, 40)),
    st.builds(
        lambda tokens: SlidingWindowMLASpec(block_size=BLOCK, sliding_window=tokens, **ATTENTION),
        TOKENS,
    ),
    st.builds(local, st.integers(1, 200).map(lambda n: n * BLOCK)),
    st.just(state()),
)


@given(SPECS, st.lists(st.integers(1, 10_000), min_size=1, max_size=20))
def test_the_first_token_is_that_of_vllms_manager(spec: Any, ends: list[int]) -> None:
    manager = get_manager_for_kv_cache_spec(
        kv_cache_spec=spec,
        max_in_flight_tokens=1024,
        max_model_len=10_000,
        block_pool=BlockPool(8, enable_caching=True, hash_block_size=BLOCK),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    (group,) = layer_groups(groups(spec))
    for end in [*ends, *(end // BLOCK * BLOCK or BLOCK for end in ends)]:
        assert group.reach.first_token(end) == manager.get_num_skipped_tokens(end)
        # So a part of the last chunk has every block of it that vLLM keeps.
        chunk_tokens = 4 * BLOCK
        if end % chunk_tokens == 0 and not group.is_state:
            kept = manager.get_num_skipped_tokens(end) // BLOCK
            part = group.part(end // chunk_tokens - 1, chunk_tokens)
            assert part.stop == end // BLOCK
            assert part.start <= max(kept, part.stop - 4)


@pytest.mark.parametrize(
    ("spec", "number", "tokens", "part"),
    [
        (window(100), 1, 96, slice(6, 12)),
        (full(32), 1, 96, slice(3, 6)),
        (state(48), 1, 96, slice(3, 4)),
        (window(18), 2, 64, slice(10, 12)),
        (window(17), 2, 64, slice(11, 12)),
        (window(1), 0, 64, slice(3, 4)),
    ],
)
def test_the_part_of_a_window_or_a_state_is_the_end_of_its_chunk(
    spec: Any, number: int, tokens: int, part: slice
) -> None:
    (group,) = layer_groups(groups(spec))
    assert group.block_size_tokens == spec.block_size
    assert group.part(number, tokens) == part


def test_what_vllms_own_cache_leaves_out_is_left_out() -> None:
    config = groups(ring(8), full(), replayed(100), window(64))
    found, rest = layer_groups(config), left_out_groups(config)
    assert [(each.number, each.layers) for each in found] == [(1, ("layer.1",)), (3, ("layer.3",))]
    assert [(each.number, each.layers) for each in rest] == [(0, ("layer.0",)), (2, ("layer.2",))]
    buffer, window_again = rest
    assert 1_000_000 // buffer.block_size_tokens == 0  # one block, for any number of tokens
    assert (window_again.block_size_tokens, window_again.reach.first_token(1000)) == (16, 901)
    assert left_out_groups(groups(full(), window(64), state())) == []


@pytest.mark.parametrize("why", ["host_resident", "enable_kv_transfer"])
def test_groups_elsewhere_are_refused(why: str) -> None:
    config = groups(full(), full())
    setattr(config.kv_cache_groups[1], why, why == "host_resident")
    with pytest.raises(Unsupported, match=r"group 1.*does not let connectors load it") as error:
        layer_groups(config)
    assert "group 0" not in str(error.value)


def shards(
    spec: Any, *, heads: int = 8, size: int = 4, stages: int = 1, **config: Any
) -> list[Any]:
    """What each rank has of a group. heads: of KV, over all ranks; config: of the model."""
    settings = {"num_attention_heads": 8, "num_key_value_heads": heads, **config}
    model = SimpleNamespace(
        hf_text_config=LlamaConfig(**settings), get_total_num_kv_heads=lambda: heads
    )
    found = []
    for rank in range(size * stages):
        parallel = SimpleNamespace(tensor_parallel_size=size, world_size=size * stages, rank=rank)
        vllm_config: Any = SimpleNamespace(model_config=model, parallel_config=parallel)
        found.append(shard_of_rank(vllm_config, spec))
    return found


def heads_of_a_rank(count: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=count, head_size=16, dtype=torch.float32
    )


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK, **ATTENTION)


def mixed(*specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={f"layer.{n}": spec for n, spec in enumerate(specs)}
    )


OWN = [(0, 4, 1), (1, 4, 1), (2, 4, 1), (3, 4, 1)]
PAIRS = [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]
ALL = [(0, 1, 4)] * 4


@pytest.mark.parametrize(
    ("spec", "heads", "expected"),
    [
        (heads_of_a_rank(2), 8, OWN),
        (heads_of_a_rank(1), 4, OWN),
        (heads_of_a_rank(1), 2, PAIRS),
        (heads_of_a_rank(1), 1, ALL),
        (latent(), 8, ALL),
        *(
            [(replace(heads_of_a_rank(2), max_tp_shards=2), 8, PAIRS)]
            if has_field(heads_of_a_rank(2), "max_tp_shards")
            else ()
        ),
        (state(), 1, OWN),
        (replace(state(), tp_replicated=True), 1, ALL),
        # Ranks have the same bytes of a group if they have those of each of its layers.
        (mixed(latent(), heads_of_a_rank(1)), 2, PAIRS),
        (mixed(latent(), heads_of_a_rank(2)), 8, OWN),
        (mixed(latent(), latent()), 8, ALL),
    ],
)
def test_ranks_that_hold_the_same_bytes(spec: Any, heads: int, expected: list[Any]) -> None:
    assert shards(spec, heads=heads) == expected


def test_ranks_that_do_not_divide_evenly_repeat_no_other() -> None:
    """Which of them would have equal heads is not known."""
    assert shards(heads_of_a_rank(1), heads=3, size=8) == [(rank, 8, 1) for rank in range(8)]
    assert shards(replace(latent(), max_tp_shards=8), size=4) == OWN


def test_ranks_of_other_stages_hold_other_layers() -> None:
    assert shards(latent(), size=2, stages=2) == [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("setting", ["num_global_key_value_heads", "swa_num_kv_heads"])
def test_where_layers_differ_in_heads_no_rank_repeats_another(setting: str) -> None:
    assert shards(heads_of_a_rank(1), heads=2, **{setting: 4}) == OWN
    assert shards(heads_of_a_rank(1), heads=2, **{setting: 2}) == PAIRS
    assert shards(heads_of_a_rank(1), heads=2, **{setting: None}) == PAIRS


def test_strides_of_tensors() -> None:
    """vLLM before 0.29 does not say which layers a tensor has, or gives no strides at all."""
    new = [
        SimpleNamespace(block_stride=64, layers=["a", "b"]),
        SimpleNamespace(block_stride=32, layers=["c"]),
    ]
    older = [SimpleNamespace(block_stride=64, shared_by=["a"])]
    oldest = [SimpleNamespace(shared_by=["a"])]
    found = [
        block_strides(SimpleNamespace(kv_cache_tensors=each))  # type: ignore[arg-type]
        for each in (new, older, oldest)
    ]
    assert found == [{"a": 64, "b": 64, "c": 32}, {}, {}]
