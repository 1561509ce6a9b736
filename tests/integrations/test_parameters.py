"""The digest of the parameters in memory: every bit of every tensor counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch

from lmcache_redis.integrations.vllm.parameters import (
    odd_numbers,
    parameters_digest,
    weighted_sum,
)


def model(dtype: Any = torch.bfloat16, *, seed: int = 1, width: int = 64) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    made = torch.nn.Sequential(*layers, torch.nn.LayerNorm(width)).to(dtype)
    made.register_buffer("scale", torch.ones((), dtype=torch.float32))
    return made


def digest(target: Any, draft: Any = None) -> bytes:
    runner = SimpleNamespace(get_model=lambda: target, drafter=SimpleNamespace(model=draft))
    return parameters_digest(SimpleNamespace(model_runner=runner))


def test_equal_parameters_have_one_digest() -> None:
    assert digest(model()) == digest(model())
    assert digest(model()) != digest(model(seed=2))
    assert digest(model()) != digest(model(torch.float16))


def test_one_optimizer_step_of_a_small_rate_is_seen() -> None:
    """In bfloat16 it changes few elements: most of their updates are rounded away."""
    trained = model(width=512)
    before, copies = digest(trained), [each.detach().clone() for each in trained.parameters()]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-7)
    trained(torch.randn(4, 512, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    pairs = zip(trained.parameters(), copies, strict=True)
    changed = sum(int((now != then).sum()) for now, then in pairs)
    assert 0 < changed < sum(each.numel() for each in copies) / 100
    assert digest(trained) != before


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
