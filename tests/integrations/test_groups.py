"""What a reach leaves over is what vLLM's own managers of KV caches leave over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from lmcache_redis.integrations.vllm.groups import Unsupported, common_block_tokens, layer_groups

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


def test_groups_keep_their_numbers_layers_and_sizes() -> None:
    found = layer_groups(groups(window(100), full(32), state(48)))
    assert [(each.number, each.layers, each.block_size_tokens) for each in found] == [
        (0, ("layer.0",), 16),
        (1, ("layer.1",), 32),
        (2, ("layer.2",), 48),
    ]
    assert common_block_tokens(found) == 96
    assert [each.part(1, 96) for each in found] == [slice(6, 12), slice(3, 6), slice(3, 4)]


def test_the_part_of_a_short_window_is_the_end_of_its_chunk() -> None:
    (group,) = layer_groups(groups(window(18)))
    assert group.part(2, 64) == slice(10, 12)
    (group,) = layer_groups(groups(window(17)))
    assert group.part(2, 64) == slice(11, 12)
    (group,) = layer_groups(groups(window(1)))
    assert group.part(0, 64) == slice(3, 4)


def test_every_group_that_is_refused_is_named() -> None:
    none = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    with pytest.raises(Unsupported, match=r"group 0 \(MambaSpec\).*; KV cache group 2") as error:
        layer_groups(groups(none, full(), none))
    assert "group 1" not in str(error.value)
