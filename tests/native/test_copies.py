# SPDX-License-Identifier: Apache-2.0
"""Copies between addresses: in bounds, and not after their time; natively and in Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest

from lmcache_redis import native
from lmcache_redis.device.cpu import _copy_in_python

Copy: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, int, int], int]

pytestmark = pytest.mark.skipif(native.copies is None, reason=native.why_not)
MOST = 1000
NEVER_NS = 2**63 - 1


@pytest.fixture(params=["native", "python"])
def copy(request: pytest.FixtureRequest) -> Copy:
    return _copy_in_python if request.param == "python" else native.copies.copy  # type: ignore[union-attr]


def columns(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def test_bytes_arrive_and_nothing_else_changes(copy: Copy) -> None:
    random = np.random.default_rng(7)
    for _ in range(50):
        source = random.integers(0, 256, 20_000, np.uint8)
        into = np.full(20_000, 0xA5, np.uint8)
        expected, at, rows = into.copy(), 0, []
        while (size := int(random.choice([1, 63, 64, 999, 1000, 1001, 4096]))) + at < 20_000:
            start = int(random.integers(0, 20_000 - size))
            expected[at : at + size] = source[start : start + size]
            rows.append((into.ctypes.data + at, source.ctypes.data + start, size))
            at += size + int(random.integers(0, 100))
        random.shuffle(rows)
        to, places, nbytes = columns(*map(list, zip(*rows, strict=True)))
        assert copy(to, places, nbytes, MOST, NEVER_NS) == nbytes.sum()
        assert np.array_equal(into, expected)
    assert copy(*columns([], [], []), MOST, NEVER_NS) == 0


def test_nothing_is_copied_after_its_time(copy: Copy) -> None:
    source, into = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    rows = columns([into.ctypes.data], [source.ctypes.data], [8])
    assert copy(*rows, MOST, time.monotonic_ns() - 1) == 0
    assert not into.any()


@pytest.mark.parametrize("size", [1 << 20, 8 << 20])
def test_it_ends_in_the_middle_when_its_time_comes(copy: Copy, size: int) -> None:
    """The same bytes, more often than any machine can in that time."""
    source, into, times = np.ones(size, np.uint8), np.zeros(size, np.uint8), 50_000
    to, places, nbytes = columns(
        [into.ctypes.data] * times, [source.ctypes.data] * times, [size] * times
    )
    copied = copy(to, places, nbytes, 1 << 20, time.monotonic_ns() + 10**8)
    assert 0 < copied < nbytes.sum()
    assert into[: min(copied, size)].all()


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (([0], [0], [1, 2]), MOST),
        (([0, 0], [0], [1]), MOST),
        (([0], [0], [1]), 0),
        (([0], [0], [1]), -1),
    ],
)
def test_what_are_no_columns(rows: tuple[list[int], ...], most: int) -> None:
    with pytest.raises(ValueError, match="columns"):
        native.copies.copy(*columns(*rows), most, NEVER_NS)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="columns"):
        native.copies.copy(b"1234567", b"1234567", b"1234567", MOST, NEVER_NS)  # type: ignore[union-attr]
