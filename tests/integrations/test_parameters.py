# SPDX-License-Identifier: Apache-2.0
"""The digest of the parameters in memory: every bit of every tensor counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from lmcache_redis.integrations.vllm.parameters import (
    Parameters,
    odd_numbers,
    parameters_digest,
    watch_packing,
    weighted_sum,
)


def model(dtype: Any = torch.bfloat16, *, seed: int = 1, width: int = 64) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    made = torch.nn.Sequential(*layers, torch.nn.LayerNorm(width)).to(dtype)
    made.register_buffer("scale", torch.ones((), dtype=torch.float32))
    return made


def read(target: Any, draft: Any = None) -> Parameters:
    runner = SimpleNamespace(get_model=lambda: target, drafter=SimpleNamespace(model=draft))
    return Parameters(*parameters_digest(SimpleNamespace(model_runner=runner)))


def digest(target: Any, draft: Any = None) -> bytes:
    return read(target, draft).weights


def test_equal_parameters_have_one_digest() -> None:
    assert digest(model()) == digest(model())
    assert digest(model()) != digest(model(seed=2))
    assert digest(model()) != digest(model(torch.float16))


@pytest.mark.parametrize("name", ["0.weight", "3.bias", "4.weight", "scale"])
def test_the_last_bit_of_any_tensor_is_seen(name: str) -> None:
    changed = model()
    tensor = changed.state_dict()[name]
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    assert digest(changed) != digest(model())


def test_the_draft_model_counts() -> None:
    assert len({digest(model()), digest(model(), model()), digest(model(), model(seed=2))}) == 3


def test_a_worker_without_a_model_raises() -> None:
    with pytest.raises(AttributeError):
        parameters_digest(SimpleNamespace())


def test_what_a_model_derives_from_its_weights_counts() -> None:
    """As MLA's ``W_UV``, which a trainer that only writes weights leaves as it was."""
    plain, derived = model(), model()
    derived[0].W_UV = torch.ones(3)
    changed = model()
    changed[0].W_UV = torch.zeros(3)
    assert digest(plain) == digest(derived) == digest(changed)
    assert len({read(each).everything for each in (plain, derived, changed)}) == 3
    derived[0].kv_cache = torch.rand(9)
    derived[0].topk_indices_buffer = torch.zeros(9)
    changed[0].W_UV = torch.ones(3)
    assert read(derived).everything == read(changed).everything


def test_tensors_that_a_reload_makes_again_are_the_same() -> None:
    """In another order of its parameters."""
    reloaded = model()
    weight = reloaded[0].weight
    del reloaded[0].weight
    reloaded[0].register_parameter("weight", weight)
    assert read(reloaded) == read(model())


def test_the_history_of_scales_that_follow_images_is_no_weight() -> None:
    """The buffers of vLLM's ``MMEncoderAttention`` for fp8 with dynamic scales."""

    def encoder(history: bool, scale: float, amax: float) -> Any:
        made = torch.nn.Module()
        made.attention = torch.nn.Module()
        made.attention.register_buffer("_fp8_q_scale", torch.full((1,), scale))
        if history:
            amaxes = torch.full((16,), amax)
            made.attention.register_buffer("_fp8_q_amax", amaxes, persistent=False)
        return made

    assert read(encoder(True, 1, 1)) == read(encoder(True, 2, 3))
    assert digest(encoder(False, 1, 1)) != digest(encoder(False, 2, 1))


def test_a_rotary_table_that_a_step_converts_is_no_weight() -> None:
    """As in gpt-oss, whose tables are made in float32."""
    computing = model()
    with set_current_vllm_config(VllmConfig()):
        computing.rotary_emb = RotaryEmbedding(64, 64, 128, 10000.0, True, torch.float32)
    before = read(computing)
    query = torch.rand(4, 64, dtype=torch.bfloat16)
    computing.rotary_emb.forward_native(torch.arange(4), query, query.clone())
    assert computing.rotary_emb.cos_sin_cache.dtype == torch.bfloat16
    assert read(computing) == before


def test_ranks_are_known_together() -> None:
    one, other = Parameters(b"1", b"one"), Parameters(b"1", None)
    assert Parameters.of_ranks([one, one]) == Parameters.of_ranks([one, one])
    assert Parameters.of_ranks([one, other]).everything is None
    assert Parameters.of_ranks([one, other]).weights == Parameters.of_ranks([one, one]).weights


class TestPacked:
    """Linear layers of vLLM on a CPU: it takes the weight away, and packs it elsewhere."""

    @pytest.fixture
    def ops(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        ops = pytest.importorskip("vllm._custom_ops")
        if not ops._supports_onednn:
            pytest.skip("vLLM for another device")
        monkeypatch.setattr(ops, "create_onednn_mm", _unwatched(ops.create_onednn_mm))
        return ops

    @staticmethod
    def packed(seed: int = 1) -> Any:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        made = model(torch.float32, seed=seed)
        dispatch_cpu_unquantized_gemm(made[2], remove_weight=True)
        assert not made[2].weight.numel()
        return made

    def test_it_is_read_when_it_is_packed(self, ops: Any) -> None:
        watch_packing(ops)
        watch_packing(ops)  # once is enough
        assert read(self.packed()) == read(self.packed())
        assert read(self.packed()).everything is not None
        other = self.packed()
        other[2].cpu_linear = self.packed(seed=2)[2].cpu_linear  # this layer alone
        assert digest(other) != digest(self.packed())

    def test_what_was_packed_before_is_not_known(self, ops: Any) -> None:
        assert read(self.packed()).everything is None

    def test_a_weight_that_is_gone_is_not_known(self) -> None:
        gone = model()
        gone[1].weight = torch.nn.Parameter(torch.empty(0))
        assert read(gone).everything is None
        gone[1].weight = None
        assert read(gone).everything is None


def _unwatched(pack: Any) -> Any:
    return getattr(pack, "__wrapped__", pack)


class TestPrefetchOffloading:
    """vLLM's own offloader, without its copies to a GPU: parameters are staging buffers."""

    @pytest.fixture
    def offloaded(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from vllm.model_executor import offloader as offloading
        from vllm.model_executor.offloader import prefetch

        made = model()
        monkeypatch.setattr(prefetch, "should_pin_memory", lambda: False)
        parts = {
            f"{number}.weight": prefetch._CpuParamOffloader(made, f"{number}.weight")
            for number in range(4)
        }
        # Layers 0 and 2, and 1 and 3, share a buffer each.
        buffers = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2)]
        for number, part in enumerate(parts.values()):
            part.assign_static_buffer(buffers[number % 2])
        found = SimpleNamespace(module_offloaders=[SimpleNamespace(_param_offloaders=parts)])
        monkeypatch.setattr(offloading, "get_offloader", lambda: found)
        return made, parts, buffers

    def test_all_layers_are_read_and_never_known_to_be_the_same(self, offloaded: Any) -> None:
        made, parts, buffers = offloaded
        before = read(made)
        assert before.everything is None
        for buffer in buffers:
            buffer.fill_(7)  # the next layers are staged
        assert read(made) == before
        for part in parts.values():
            part._cpu_storage.view(-1).view(torch.uint8)[-1] ^= 1
            changed = read(made)
            assert changed != before
            before = changed

    def test_another_way_of_offloading_is_not_known(
        self, offloaded: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor import offloader as offloading

        monkeypatch.setattr(offloading, "get_offloader", SimpleNamespace)
        with pytest.raises(AttributeError):
            read(model())


def summed(tensor: Any) -> int:
    return int(weighted_sum(tensor, odd_numbers(4)))  # several parts


class TestWeightedSum:
    """What is computed on a GPU."""

    def test_it_sees_each_changed_word(self) -> None:
        data = torch.arange(83, dtype=torch.uint8)  # no whole word at the end
        found = {summed(data)}
        for byte in range(83):
            for bit in (1, 128):
                other = data.clone()
                other[byte] ^= bit
                found.add(summed(other))
        assert len(found) == 1 + 2 * 83

    def test_two_changed_signs_do_not_cancel(self) -> None:
        words = torch.randint(-(1 << 62), 1 << 62, (16,))
        found = {summed(words)}
        for one in range(16):
            for other in range(one):
                signs = words.clone()
                signs[[one, other]] ^= -(1 << 63)
                found.add(summed(signs))
        assert len(found) == 1 + 16 * 15 // 2

    def test_words_and_parts_that_change_places_are_seen(self) -> None:
        words = torch.randint(-(1 << 62), 1 << 62, (16,))
        assert len({summed(words), summed(words.roll(1)), summed(words.roll(4))}) == 3

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
    def test_any_dtype_stride_and_place(self, dtype: Any) -> None:
        data = torch.randn(6, 10).to(dtype)
        turned = data.t().contiguous().t()
        assert not turned.is_contiguous()
        assert summed(data) == summed(turned)
        assert summed(data[1:]) == summed(data[1:].clone())  # not at the start of a word
        assert summed(data[:5]) != summed(data[1:])
