# SPDX-License-Identifier: Apache-2.0
"""The dimension of heads is found by what a layer's backend writes, and what it means is proved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
import transformers
from vllm.platforms import current_platform

from lmcache_redis.device.shares import Share
from lmcache_redis.errors import ConfigError, Unsupported
from lmcache_redis.integrations.vllm.identity.heads import cut_by_head, explained_heads
from lmcache_redis.integrations.vllm.support import total_kv_heads
from tests.integrations.layers import (
    BLOCK,
    BLOCKS,
    HEAD_SIZE,
    HOW,
    Backend,
    can_run,
    config_of,
    cpu_layer,
    registration,
)
from tests.integrations.test_groups import full

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM for the CPU")

ISA = "amx" if can_run("amx") else "vec"


def layer_of(heads: int, **options: Any) -> Any:
    return cpu_layer(ISA, heads=heads, **options)


def explained(layers: dict[str, Any], heads: int) -> tuple[dict[str, int], dict[str, str]]:
    caches = {name: layer.kv_cache for name, layer in layers.items()}
    return explained_heads(config_of(layers), caches, heads, **HOW)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_a_head_is_packed_alike_at_every_size(dtype: str) -> None:
    found = {
        heads: explained({"layer.0": layer_of(heads, dtype=dtype, k_scale=0.5)}, heads)
        for heads in (1, 2, 4, 8)
    }
    assert {dims["layer.0"] for dims, _ in found.values()} == {1}
    assert len({str(pairs) for _, pairs in found.values()}) == 1


def test_what_decides_the_bytes_of_a_head_is_told_apart() -> None:
    class Swapped:
        """Swaps two numbers of a head, or K and V."""

        def __init__(self, layer: Any, crossed: bool) -> None:
            self.impl, self.crossed = layer.impl, crossed

        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, *rest: Any) -> None:
            key, value = key.clone(), value.clone()
            key[3, :, 9], key[5, :, 7] = key[5, :, 7].clone(), key[3, :, 9].clone()
            if self.crossed:
                key, value = value, key
            self.impl.do_kv_cache_update(layer, key, value, *rest)

    packings = {explained({"layer.0": layer_of(2)}, 2)[1]["kv_packing"]}
    for crossed in (False, True):
        layer = layer_of(2)
        layer.impl = Swapped(layer, crossed)
        packings.add(explained({"layer.0": layer}, 2)[1]["kv_packing"])
    if can_run("amx"):
        vec = layer_of(2)
        vec.isa = "vec"
        packings.add(explained({"layer.0": vec}, 2)[1]["kv_packing"])
    assert len(packings) == 3 + can_run("amx")
    scaled = {
        explained({"layer.0": layer_of(2, dtype="fp8_e4m3", k_scale=scale)}, 2)[1]["kv_scales"]
        for scale in (0.5, 1.0)
    }
    assert len(scaled) == 2


def backed(backend: Backend, shape: Sequence[int], heads: int) -> dict[str, Any]:
    layer = layer_of(heads)
    layer.impl = backend
    layer.kv_cache = torch.zeros(*shape, HEAD_SIZE, dtype=torch.bfloat16)
    return {"layer.0": layer}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_k_and_v_may_be_apart(heads: int) -> None:
    """With two heads, the dimension of K and V has as many."""
    backend = Backend("blocks, K or V, heads, tokens")
    layers = backed(backend, (BLOCKS, 2, heads, BLOCK), heads)
    assert explained(layers, heads)[0] == {"layer.0": 2}
    backend = Backend("K or V, blocks, heads, tokens")
    layers = backed(backend, (2, BLOCKS, heads, BLOCK), heads)
    assert explained(layers, heads)[0] == {"layer.0": 2}


@pytest.mark.parametrize(
    ("mix", "why"),
    [
        ("swapped", "does not count heads"),
        ("scaled by the largest head", "does not count heads"),
        ("mirrored", "packed differently"),
    ],
)
def test_heads_that_are_not_their_own_are_refused(mix: str, why: str) -> None:
    backend = Backend("blocks, K or V, heads, tokens", mix)
    layers = backed(backend, (BLOCKS, 2, 4, BLOCK), 4)
    with pytest.raises(Unsupported, match=why):
        explained(layers, 4)


def test_what_cannot_be_cut_is_refused_with_a_reason() -> None:
    def refused(layers: dict[str, Any], why: str, heads: int = 2) -> None:
        with pytest.raises(Unsupported, match=why):
            explained(layers, heads)

    tokens_first = backed(Backend("blocks, K or V, tokens, heads"), (BLOCKS, 2, BLOCK, 4), 4)
    refused(tokens_first, "not head-major", 4)
    refused({"layer.0": layer_of(2), "draft": layer_of(4)}, "draft: it has 4 KV heads")
    scaled = layer_of(2, dtype="fp8_e4m3")
    scaled._k_scale = torch.ones(2)
    refused({"layer.0": scaled}, "scales of their own")
    broken = layer_of(2)
    broken.isa = "no such set"
    refused({"layer.0": broken}, "Invalid ISA type")
    viewed = layer_of(2)
    caches = {"layer.0": viewed.kv_cache.view(BLOCKS, 2, 2 * BLOCK, HEAD_SIZE)}
    with pytest.raises(Unsupported, match="another shape"):
        explained_heads(config_of({"layer.0": viewed}), caches, 2, **HOW)


def test_a_layer_that_reads_the_kv_of_another_is_cut_like_it() -> None:
    layer, reader = layer_of(2), layer_of(2)
    reader.kv_sharing_target_layer_name = "layer.0"
    reader.kv_cache = layer.kv_cache
    dims, pairs = explained({"reader": reader, "layer.0": layer}, 2)
    assert dims == {"layer.0": 1, "reader": 1}
    assert pairs == explained({"layer.0": layer}, 2)[1]
    reader.kv_sharing_target_layer_name = "elsewhere"
    with pytest.raises(Unsupported, match="elsewhere"):
        explained({"reader": reader, "layer.0": layer}, 2)


def cut(
    rank: int = 0,
    ranks: int = 1,
    stages: int = 1,
    heads: int | None = 4,
    shares: int | None = None,
    **changed: dict[str, Any],
) -> tuple[list[Share], int, dict[str, str]]:
    """changed: parts of the engine's settings."""
    layer = layer_of(max(1, (heads or 4) // ranks))
    config = config_of({"layer.0": layer}, rank, ranks, stages)
    for part, settings in changed.items():
        setattr(config, part, SimpleNamespace(**settings))
    found, pairs = cut_by_head(config, {"layer.0": layer.kv_cache}, heads, shares, **HOW)
    return [*found.shares], found.count, pairs


def test_ranks_of_every_size_have_the_same_pairs() -> None:
    shares, count, pairs = cut(0, 1)
    assert (shares, count) == ([Share(each, each, 1) for each in range(4)], 4)
    assert (pairs["tensor_parallel"], pairs["rank"]) == ("any", "stage 0 of 1")
    for rank, held in ((0, [0, 1]), (1, [2, 3])):
        shares, count, others = cut(rank, 2)
        assert [each.number for each in shares] == held
        assert (count, others) == (4, pairs)
    assert cut(5, 8)[0] == [Share(2, 0, 1)]
    # Of the second stage of a pipeline: other layers.
    shares, count, others = cut(3, 2, stages=2, shares=2)
    assert (shares, count) == ([Share(3, 0, 2)], 4)
    assert others["rank"] == "stage 1 of 2"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"heads": None}, "different numbers of KV heads"),
        ({"shares": 3}, "must divide"),
        ({"ranks": 4, "shares": 2}, "a multiple of 4"),
        ({"stages": 64, "shares": 4}, "more than 255"),
        # Of another size it is another model.
        ({"load_config": {"load_format": "dummy"}}, "draws other weights at each size"),
        ({"model_config": {"quantization": "fp8"}}, "scaled by rank"),
        ({"speculative_config": {"method": "eagle", "draft_model_config": 1}}, "its draft model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(how: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, Unsupported), match=why):
        cut(**how)


GEMMA_4 = {"num_key_value_heads": 4, "num_kv_shared_layers": 3, "attention_k_eq_v": True}


@pytest.mark.parametrize(
    ("config", "total"),
    [
        ({"num_key_value_heads": 4}, 4),
        ({"num_key_value_heads": 4, "vision_config": {"num_key_value_heads": 8}}, 4),
        ({"num_key_value_heads": 4, "num_global_key_value_heads": 2}, None),
        ({"num_key_value_heads": 4, "blocks": [{"attention": {"n_heads_in_group": 2}}]}, None),
        ({"num_key_value_heads": 4, "other": {"num_attention_groups": 8}}, None),
        # How many layers share the KV of others is no number of heads.
        (transformers.Gemma3nTextConfig(num_key_value_heads=4).to_dict(), 4),
        (transformers.Gemma4TextConfig(**GEMMA_4).to_dict(), 4),
        (transformers.Gemma4TextConfig(**GEMMA_4, num_global_key_value_heads=2).to_dict(), None),
    ],
)
def test_other_heads_of_some_layers_are_seen(config: dict[str, Any], total: int | None) -> None:
    text = SimpleNamespace(to_dict=lambda: config)
    model: Any = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: 4)
    assert total_kv_heads(model) == total


def registered(directory: Path, extra: dict[str, Any], heads: int, **how: int) -> list[Any]:
    """The groups of a rank with so many heads: one."""
    layer = layer_of(heads)
    spec, layers = replace(full(BLOCK), num_kv_heads=heads), {"layer.0": layer}
    caches = {"layer.0": layer.kv_cache}
    return registration(directory, [spec], caches, layers=layers, **how, **extra)[0]


@pytest.mark.parametrize(
    ("extra", "heads", "shares", "why"),
    [
        ({}, 4, None, ""),
        ({"share_across_tp": True}, 4, 4, ""),
        ({"share_across_tp": True, "kv_shares": 2}, 4, 2, ""),
        ({"share_across_tp": True, "kv_shares": 3}, 4, None, "must divide the model's 4 KV heads"),
        ({"share_across_tp": True}, 2, None, "it has 2 KV heads on this rank, and not 4"),
    ],
)
def test_a_group_is_cut_by_head_if_it_can_be(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    extra: dict[str, Any],
    heads: int,
    shares: int | None,
    why: str,
) -> None:
    """If not, it is registered as ever, and one line says why."""
    with caplog.at_level(logging.WARNING, "vllm.lmcache_redis"):
        found = registered(tmp_path, extra, heads, times=2)  # after a sleep, again
    said = [each.getMessage() for each in caplog.records if "not shared" in each.getMessage()]
    assert len(said) == bool(why)
    assert all(why in each for each in said)
    for group in found:
        if shares is None:
            assert group.heads is None
            assert "tensor_parallel" not in group.identity
        else:
            assert [share.number for share in group.heads.shares] == [*range(shares)]
            assert group.identity["tensor_parallel"] == "any"


def test_ranks_that_may_cut_otherwise_divide_no_stores(tmp_path: Path) -> None:
    (apart,) = registered(tmp_path, {}, 1, ranks=8)
    assert (apart.shard, apart.replica) == ((3, 4), (1, 2))
    for shares, why in ((4, "cut"), (3, "not cut")):
        extra = {"share_across_tp": True, "kv_shares": shares}
        (group,) = registered(tmp_path, extra, 1, ranks=8)
        assert (group.heads is not None, group.replica) == (why == "cut", (0, 1))
