"""Copies over the bus: which are merged, and which rows they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device import driver
from lmcache_redis.device.bus import UNPINNED, Bus, BusCopies, Rows, merged, rows_of

MOST_PITCH = 1000


def copies(*rows: tuple[int, int, int]) -> BusCopies:
    return BusCopies(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def of(whole: BusCopies) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in whole), strict=True))


@pytest.mark.parametrize(
    ("rows", "pieces", "expected"),
    [
        ([(0, 100, 8), (8, 108, 8), (16, 116, 4)], [0, 0, 0], [(0, 100, 20)]),
        ([(0, 100, 8), (8, 108, 8)], [0, 1], [(0, 100, 8), (8, 108, 8)]),
        ([(0, 100, 8), (8, 108, 8)], [UNPINNED] * 2, [(0, 100, 8), (8, 108, 8)]),
        ([(0, 100, 8), (9, 108, 8)], [0, 0], [(0, 100, 8), (9, 108, 8)]),
        ([(0, 100, 8), (8, 109, 8)], [0, 0], [(0, 100, 8), (8, 109, 8)]),
        ([(8, 108, 8), (0, 100, 8)], [0, 0], [(8, 108, 8), (0, 100, 8)]),
        ([(0, 100, 8)], [0], [(0, 100, 8)]),
    ],
)
def test_neighbours_on_both_sides_are_one(
    rows: list[tuple[int, int, int]], pieces: list[int], expected: list[tuple[int, int, int]]
) -> None:
    whole, of_piece = merged(copies(*rows), np.array(pieces))
    assert of(whole) == expected
    assert len(of_piece) == len(expected)


def test_equal_steps_are_rows() -> None:
    found = rows_of(
        copies((0, 500, 8), (16, 520, 8), (32, 540, 8), (48, 560, 4), (60, 0, 4)),
        np.zeros(5, dtype=np.int64),
        MOST_PITCH,
    )
    assert found == [
        Rows(0, 16, 500, 20, 8, 3),
        Rows(48, 4, 560, 4, 4, 1),
        Rows(60, 4, 0, 4, 4, 1),
    ]


@pytest.mark.parametrize(
    ("host_step", "device_step", "piece"),
    [(-16, 16, 0), (16, -16, 0), (7, 16, 0), (16, 7, 0), (16, 16, 1), (MOST_PITCH + 1, 16, 0)],
)
def test_a_row_ends_where_a_2d_copy_would_be_wrong(
    host_step: int, device_step: int, piece: int
) -> None:
    found = rows_of(
        copies((5000, 5000, 8), (5000 + host_step, 5000 + device_step, 8)),
        np.array([0, piece]),
        MOST_PITCH,
    )
    assert [each.height for each in found] == [1, 1]


def test_a_pitch_may_be_as_large_as_the_gpu_allows() -> None:
    rows = copies((0, 0, 8), (MOST_PITCH, 8, 8), (2 * MOST_PITCH, 16, 8))
    found = rows_of(rows, np.zeros(3, dtype=np.int64), MOST_PITCH)
    assert found == [Rows(0, MOST_PITCH, 0, 8, 8, 3)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12).map(lambda n: n * 8),
            st.integers(0, 12).map(lambda n: n * 8),
            st.sampled_from([4, 8]),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_rows_are_the_copies(each: list[tuple[int, int, int, int]]) -> None:
    given_copies = [row[:3] for row in each]
    found = rows_of(copies(*given_copies), np.array([row[3] for row in each]), MOST_PITCH)
    assert given_copies == [
        (row.host + n * row.host_pitch, row.device + n * row.device_pitch, row.nbytes)
        for row in found
        for n in range(row.height)
    ]
    assert all(min(row.host_pitch, row.device_pitch) >= row.nbytes for row in found)


@pytest.mark.parametrize("inward", [True, False])
def test_what_is_not_pinned_is_copied_apart(monkeypatch: pytest.MonkeyPatch, inward: bool) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(driver, "has", lambda name: False)
    monkeypatch.setattr(driver, "enqueue_copy_in", lambda *call: asked.append(("in", *call)))
    monkeypatch.setattr(driver, "enqueue_copy_out", lambda *call: asked.append(("out", *call)))
    monkeypatch.setattr(driver, "enqueue_copy_2d", lambda *call: asked.append(("2d", *call)))
    bus = Bus(MOST_PITCH, lambda hosts: np.where(hosts < 100, UNPINNED, 0))
    rows = copies((200, 600, 8), (0, 500, 8), (216, 620, 8), (8, 508, 8))
    (bus.enqueue_in if inward else bus.enqueue_out)(rows, 7)
    if inward:
        assert asked[:2] == [("in", 500, 0, 8, 7), ("in", 508, 8, 8, 7)]
        assert asked[2:] == [("2d", 600, 20, 200, 16, 8, 2, 7)]
    else:
        assert asked[:2] == [("out", 0, 500, 8, 7), ("out", 8, 508, 8, 7)]
        assert asked[2:] == [("2d", 200, 16, 600, 20, 8, 2, 7)]
    asked.clear()
    bus.enqueue_in(copies((200, 600, 8), (208, 608, 8)), 7)
    assert asked == [("in", 600, 200, 16, 7)], "one copy is no row"
