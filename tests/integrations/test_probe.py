# SPDX-License-Identifier: Apache-2.0
"""Backends that pack KV differently have different identities: vLLM's CPU backend on each host."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from lmcache_redis.integrations.vllm.identity.probe import kv_identity
from tests.integrations.layers import (
    BLOCK,
    BLOCKS,
    HEAD_SIZE,
    HEADS,
    HOW,
    Backend,
    can_run,
    config_of,
    cpu_layer,
)

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM for the CPU")


def identity_of(
    layers: dict[str, Any],
    caches: dict[str, torch.Tensor] | None = None,
    strides: dict[str, int] | None = None,
) -> dict[str, str]:
    """caches: as they are registered, where the layers have others."""
    caches = caches or {name: layer.kv_cache for name, layer in layers.items()}
    return kv_identity(config_of(layers), caches, **HOW | {"block_strides": strides or {}})


def packing(layer: Any) -> str:
    return identity_of({"layer.0": layer})["kv_packing"]


@pytest.mark.skipif(not can_run("amx"), reason="needs a CPU with AMX")
def test_instruction_sets_that_pack_differently_are_told_apart() -> None:
    found = {isa: packing(cpu_layer(isa)) for isa in ("amx", "vec", "vec16")}
    assert found["amx"] != found["vec"]
    # These two compute differently and pack alike: their hosts may share.
    assert found["vec16"] == found["vec"]


def test_every_place_of_a_block_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that swaps any two numbers, or K and V, has another identity."""
    plain = packing(cpu_layer("vec"))
    update = CPUAttentionBackendImpl.do_kv_cache_update
    for number, (first, second) in enumerate(
        [
            ((0, 0, 0), (0, 0, 1)),
            ((0, 0, 3), (1, 0, 3)),
            ((5, 0, 9), (5, 1, 9)),
            ((63, 1, 63), (0, 0, 0)),
        ]
    ):

        def swapped(
            self: Any,
            layer: Any,
            key: torch.Tensor,
            *rest: Any,
            a: tuple[int, ...] = first,
            b: tuple[int, ...] = second,
        ) -> None:
            key[a], key[b] = key[b].clone(), key[a].clone()
            update(self, layer, key, *rest)

        monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", swapped)
        assert packing(cpu_layer("vec")) != plain, number

    def crossed(self: Any, layer: Any, key: Any, value: Any, *rest: Any) -> None:
        update(self, layer, value, key, *rest)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", crossed)
    assert packing(cpu_layer("vec")) != plain


def test_fp8_and_its_scales_count() -> None:
    isa = "amx" if can_run("amx") else "vec"
    found = [
        tuple(identity_of({"layer.0": layer}).items())
        for layer in (
            cpu_layer(isa),
            cpu_layer(isa, dtype="fp8_e4m3"),
            cpu_layer(isa, dtype="fp8_e5m2"),
            cpu_layer(isa, dtype="fp8_e4m3", k_scale=0.25),
        )
    ]
    assert len(set(found)) == 4


def test_dtypes_that_cannot_be_probed_are_told_apart() -> None:
    """As fp8 on a processor for which vLLM has no kernels of it."""
    found = [
        packing(cpu_layer("no such set", dtype=dtype)) for dtype in ("fp8_e4m3", "fp8_e5m2", "auto")
    ]
    assert len(set(found)) == 3


def test_the_engines_cache_and_state_stay_as_they_are() -> None:
    layer = cpu_layer("vec")
    layer.kv_cache.fill_(3)
    state = dict(vars(layer.impl))

    class Remembers(CPUAttentionBackendImpl):  # as Triton's does with the scales in a cache
        def do_kv_cache_update(
            self, layer: Any, key: Any, value: Any, cache: Any, slots: Any
        ) -> None:
            self.first_cache = cache
            layer.first_cache = cache
            super().do_kv_cache_update(layer, key, value, cache, slots)

    layer.impl.__class__ = Remembers
    assert packing(layer)
    assert vars(layer.impl) == state
    assert not hasattr(layer, "first_cache")
    assert bool((layer.kv_cache == 3).all())


@pytest.mark.parametrize("why", ["no method", "raises", "no layer", "shape", "scale"])
def test_what_cannot_be_probed_is_named_by_its_backend(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = {f"layer.{number}": cpu_layer("vec") for number in range(3)}
    caches = {name: layer.kv_cache for name, layer in layers.items()}
    for layer in layers.values():
        if why == "no method":
            layer.impl = SimpleNamespace()
        elif why == "raises":
            layer.isa = "no such set"
        elif why == "scale":
            layer._k_scale = torch.empty(1, device="meta")
        elif why == "shape":
            layer.kv_cache = torch.zeros(BLOCKS, 8, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "vllm.lmcache_redis"):
        found = identity_of({} if why == "no layer" else layers, caches)
    assert found["kv_packing"] != packing(cpu_layer("vec"))
    (said,) = caplog.messages
    assert "cannot be probed" in said


@pytest.mark.parametrize(
    ("order", "blocks_per_block"),
    [
        ("K or V, blocks, tokens, heads", 1),
        ("blocks, K or V, tokens, heads", 1),
        ("blocks, K or V, tokens, heads", 2),  # the kernel's
    ],
)
def test_the_scratch_is_like_the_cache_with_two_blocks(order: str, blocks_per_block: int) -> None:
    block, k_first = BLOCK // blocks_per_block, order.startswith("K")

    def shape(blocks: int) -> tuple[int, ...]:
        outer = (2, blocks) if k_first else (blocks, 2)
        return *outer, block, HEADS, HEAD_SIZE

    layer = cpu_layer("vec")
    layer.impl = backend = Backend(order, block=block)
    layer.kv_cache = torch.zeros(shape(BLOCKS * blocks_per_block), dtype=torch.bfloat16)
    page = 2 * BLOCK * HEADS * HEAD_SIZE * 2
    identity_of({"a": layer}, strides={"a": page // 2 if k_first else page})
    expected = shape(2 * blocks_per_block)
    assert backend.seen[0] == (expected, torch.empty(expected).stride())
    assert not layer.kv_cache.any()


def test_a_latent_cache_is_probed_too() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    def layer(*, swapped: bool) -> Any:
        class Backend(CPUMLAImpl):
            def do_kv_cache_update(self, kv_c_normed: Any, k_pe: Any, *rest: Any) -> None:
                if swapped:
                    kv_c_normed = kv_c_normed.flip(-1)
                super().do_kv_cache_update(kv_c_normed, k_pe, *rest)

        return SimpleNamespace(
            impl=object.__new__(Backend),
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            num_kv_heads=1,
            head_size=80,
            kv_cache_dtype="auto",
            kv_cache=torch.zeros(BLOCKS, BLOCK, 80, dtype=torch.bfloat16),
            _k_scale=torch.tensor(1.0),
        )

    found = [packing(layer(swapped=swapped)) for swapped in (False, False, True)]
    assert found[0] == found[1] != found[2]
