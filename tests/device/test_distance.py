# SPDX-License-Identifier: Apache-2.0
"""The distance of two parts, against a plain reference and torch's own types."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from lmcache_redis.chunks.names import Reach
from lmcache_redis.device.distance import (
    FAR,
    FAR_STATES,
    far_apart,
    numbers,
    page_distances,
    part_distance,
)
from lmcache_redis.device.layout import KVLayout, Pages, Segment

BLOCKS = 4


def layout(*pages: Pages, cache_dtype: str = "auto") -> KVLayout:
    return KVLayout(
        identity=(("kv_cache_dtype", cache_dtype),),
        dtype=pages[0].dtype if pages else "",
        device="cpu",
        block_size_tokens=16,
        num_blocks=8,
        segments=(Segment(0, 0, 64, 64),),
        pages=pages,
    )


def stripes(payload: bytes, nbytes: int) -> list[memoryview]:
    return [memoryview(payload[n : n + nbytes]) for n in range(0, len(payload), nbytes)]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def plain_distance(one: Sequence[float], other: Sequence[float]) -> float:
    apart = statistics.median(abs(a - b) for a, b in zip(one, other, strict=True))
    size = max(statistics.median(map(abs, each)) for each in (one, other))
    return apart / size


FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        source = torch.arange(256, dtype=torch.uint8)
    else:
        source = torch.randn(500, dtype=torch.float32).to(dtype).view(torch.uint8)
    found = numbers(source.numpy(), str(dtype).removeprefix("torch."))
    expected = source.view(dtype).to(torch.float32).numpy()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("stripe_bytes", [40, 64, 1 << 20])
def test_the_farthest_pages_decide(dtype: torch.dtype, stripe_bytes: int) -> None:
    torch.manual_seed(1)
    one = torch.randn(2, 2, BLOCKS, 2, 11).to(dtype)
    other = (one.float() * (1 + torch.randn(one.shape) / 50)).to(dtype)
    other[1, 0, 3] = torch.randn(2, 11).to(dtype)
    name = str(dtype).removeprefix("torch.")
    found = part_distance(
        layout(Pages((2, 2), name, (2, 11))),
        BLOCKS,
        stripes(raw(one), stripe_bytes),
        stripes(raw(other), stripe_bytes),
    )
    assert found is not None
    assert (found.segment, found.block) == (2, 3)
    pages = [each[1, 0, 3].float().flatten().tolist() for each in (one, other)]
    assert found.far == pytest.approx(plain_distance(*pages), rel=1e-5)
    assert found.far > FAR


def test_pages_of_several_types_follow_each_other() -> None:
    """States of two types, as those of Mamba."""
    one = [torch.randn(2, BLOCKS, 7).bfloat16(), torch.randn(2, BLOCKS, 5)]
    other = [each.clone() for each in one]
    other[1][0, 2] += 1.0
    pages = [Pages((2,), "bfloat16", (7,)), Pages((2,), "float32", (5,))]
    payloads = [stripes(b"".join(map(raw, each)), 50) for each in (one, other)]
    found = part_distance(layout(*pages), BLOCKS, *payloads)
    assert found is not None
    assert (found.segment, found.block) == (2, 2)
    assert part_distance(layout(*pages), BLOCKS, payloads[0], payloads[0]) == (0.0, 0, 0)


def test_bytes_without_numbers_are_not_compared() -> None:
    payload = [stripes(random.Random(n).randbytes(BLOCKS * 22), 30) for n in range(2)]
    for pages in ((), (Pages((1,), "uint8", (22,)),), (Pages((1,), "int8", (22,)),)):
        assert part_distance(layout(*pages), BLOCKS, *payload) is None


def test_bytes_that_an_engine_fills_with_fp8_are_numbers() -> None:
    pages = Pages((1,), "uint8", (64,))
    payloads = [raw(torch.randn(BLOCKS, 64).to(torch.float8_e5m2)) for _ in range(2)]
    some = [stripes(each, 100) for each in payloads]
    for cache_dtype, is_compared in (("fp8_e5m2", True), ("fp8", True), ("fp8_ds_mla", False)):
        found = part_distance(layout(pages, cache_dtype=cache_dtype), BLOCKS, *some)
        assert (found is not None) == is_compared
        assert found is None or found.far > FAR


def test_states_amplify_rounding() -> None:
    pages = Pages((1,), "float32", (4,))
    state = msgspec.structs.replace(layout(pages), reach=Reach("state"))
    assert far_apart(layout(pages)) == FAR
    assert far_apart(state) == FAR_STATES > FAR


def one_page(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 0.0),
        ((1, 2, 3, 4), (1, 2, 3, 4), 0.0),
        ((1, 2, 3, 4), (-1, -2, -3, -4), 2.0),
        ((0, 0, 0, 0), (1, 2, 3, 4), 1.0),
        # A few values that rounding changed much, or that are large, decide nothing.
        ((1, 1, 1, 1, 1), (1, 1, 1, 9, -5), 0.0),
        ((900, 1, 1, 1, 1), (900, 2, 2, 2, 2), 0.5),
        # Mostly zeros: means.
        ((0, 0, 0, 0, 4), (0, 0, 0, 0, 2), 0.5),
        ((math.nan, 1, 1), (math.nan, 1, 1), 0.0),
        ((math.inf, 1, 1), (math.inf, 1, 1), 0.0),
        ((1, 1, 1), (math.nan, math.nan, math.nan), math.inf),
        ((0, 0, 0), (math.nan, math.nan, math.nan), math.inf),
    ],
)
def test_distances_of_pages(one: Sequence[float], other: Sequence[float], expected: float) -> None:
    for a, b in ((one, other), (other, one)):
        assert page_distances(one_page(*a), one_page(*b)).tolist() == [expected]


def test_large_pages_are_sampled_evenly() -> None:
    torch.manual_seed(1)
    one = torch.randn(BLOCKS, 100_000)
    other = one.clone()
    other[2, 30_000:] = torch.randn(70_000)
    payloads = [stripes(raw(each), 1 << 20) for each in (one, other)]
    found = part_distance(layout(Pages((1,), "float32", (100_000,))), BLOCKS, *payloads)
    assert found is not None
    assert (found.segment, found.block) == (0, 2)
    expected = plain_distance(one[2].tolist(), other[2].tolist())
    assert found.far == pytest.approx(expected, rel=0.1)
