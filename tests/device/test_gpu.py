# SPDX-License-Identifier: Apache-2.0
"""Copies to and from a GPU: which are merged, and which are apart."""

from __future__ import annotations

import numpy as np
import pytest

from lmcache_redis.device import driver
from lmcache_redis.device.gpu import UNPINNED, Batches, BusCopies, CopyStream, merged


def copies(*rows: tuple[int, int, int]) -> BusCopies:
    return BusCopies(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def of(whole: BusCopies) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in whole), strict=True))


@pytest.mark.parametrize(
    ("rows", "pieces", "expected"),
    [
        ([(0, 100, 8), (8, 108, 8), (16, 116, 4)], [0, 0, 0], [(0, 100, 20)]),
        ([(0, 100, 8), (8, 108, 8)], [0, 1], [(0, 100, 8), (8, 108, 8)]),
        ([(0, 100, 8), (9, 108, 8)], [0, 0], [(0, 100, 8), (9, 108, 8)]),
        ([(0, 100, 8), (8, 109, 8)], [0, 0], [(0, 100, 8), (8, 109, 8)]),
        ([(8, 108, 8), (0, 100, 8)], [0, 0], [(8, 108, 8), (0, 100, 8)]),
        ([(0, 100, 8)], [0], [(0, 100, 8)]),
    ],
)
def test_neighbours_on_both_sides_are_one(
    rows: list[tuple[int, int, int]], pieces: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert of(merged(copies(*rows), np.array(pieces))) == expected


@pytest.mark.parametrize("inward", [True, False])
def test_what_is_not_pinned_is_copied_apart(monkeypatch: pytest.MonkeyPatch, inward: bool) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(driver, "enqueue_copy_in", lambda *call: asked.append(("in", *call)))
    monkeypatch.setattr(driver, "enqueue_copy_out", lambda *call: asked.append(("out", *call)))
    monkeypatch.setattr(driver, "create_stream", lambda: 7)
    monkeypatch.setattr(driver, "create_event", lambda: 0)
    stream = CopyStream(lambda hosts: np.where(hosts < 100, UNPINNED, 0), Batches(0, wanted=False))
    rows = (200, 600, 8), (0, 500, 8), (208, 608, 8), (8, 508, 8)
    stream.copy(copies(*rows), inward=inward)
    if inward:
        assert asked == [("in", 500, 0, 8, 7), ("in", 508, 8, 8, 7), ("in", 600, 200, 16, 7)]
    else:
        assert asked == [("out", 0, 500, 8, 7), ("out", 8, 508, 8, 7), ("out", 200, 600, 16, 7)]
    asked.clear()
    stream.copy(copies(), inward=inward)
    assert asked == []
