# SPDX-License-Identifier: Apache-2.0
"""What a plan says and draws of given rows."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.plan import shown
from lmcache_redis.plan.figures import PlanRow

GIB = 1 << 30
ROW = PlanRow(
    replicas=2,
    chunk_size_tokens=256,
    pool_bytes=8 * GIB,
    disk_bytes=0,
    redis_bytes=64 * GIB,
    engine_bytes=0,
    redis_ratio=1.0,
    store_after=1,
    requests=10,
    prompt_tokens=1000,
    asked_tokens=1000,
    hit_tokens=500,
    hit_rate=0.5,
    hit_rate_pool=0.25,
    hit_rate_disk=0.0,
    hit_rate_redis=0.25,
    slower_tokens=0,
    stored_bytes=GIB,
    gpu_s_saved=100.0,
    prefill_s_saved=90.0,
    first_token_s_saved=9.0,
    busy_share=1.0,
    link_bytes_per_s=1e6,
    link_peak_bytes_per_s=2e6,
    link_peak_share=1.0,
    usd_per_month=200.0,
    usd_saved_per_month=1500.0,
)


def row(**other: Any) -> PlanRow:
    return ROW._replace(**other)


def test_the_sentence_names_what_differs() -> None:
    """Sizes always; what was tried in one way only is no choice."""
    less = row(redis_bytes=0, hit_rate=0.25, usd_saved_per_month=100.0)
    assert shown.sentence([ROW, less]) == (
        "What nets the most: 8 GiB of host pool and 64 GiB of Redis, $1,300 a month (saves $1,500 "
        "of GPU time, costs $200), and a hit rate of 50.0%, where the highest is 50.0%."
    )
    for other, said in (
        ({"replicas": 1}, "2 replicas"),
        ({"chunk_size_tokens": 512}, "256 tokens in a chunk"),
        ({"store_after": 2}, "1 requests before a chunk is stored"),
    ):
        text = shown.sentence([ROW, less._replace(**other)])
        assert f"64 GiB of Redis and {said}, $1,300 a month" in text
    untimed = row(usd_saved_per_month=None)
    assert shown.sentence([untimed]).startswith("Cheapest of what has 95 % of the highest hit rate")
    assert "no row saves" in shown.sentence([row(usd_saved_per_month=200.0)])
    assert "saves nothing" in shown.sentence([row(hit_rate=0.0)])


@pytest.mark.parametrize(
    ("name", "said"),
    [("link_peak_share", "cannot carry that"), ("busy_share", "cannot compute the rest")],
)
def test_the_sentence_warns_of_what_is_too_small(name: str, said: str) -> None:
    for value, is_said in ((None, False), (1.0, False), (1.01, True)):
        assert (said in shown.sentence([row(**{name: value})])) is is_said


def test_tokens_that_a_slow_link_leaves_are_told() -> None:
    assert shown.warnings([ROW, row(slower_tokens=9)]) == []
    (said,) = shown.warnings([ROW, row(slower_tokens=10), row(slower_tokens=204)])
    assert said.startswith("Up to 20% of the tokens were found and not loaded")
    assert shown.warnings([row(asked_tokens=0, slower_tokens=0)]) == []


def test_sizes_are_short() -> None:
    assert [shown.gib(each * GIB) for each in (0, 0.001234, 1.5, 9.999, 10, 1234.5)] == [
        "0", "0.00123", "1.5", "10", "10", "1,234",
    ]  # fmt: skip


def lines_of(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The lines of a plot by their colour."""
    found = re.findall(r'<path d="M([^"]+)" fill="none" stroke="(#\w+)"', svg)
    points = {colour: [p.split(",") for p in path.split("L")] for path, colour in found}
    return {colour: [(float(x), float(y)) for x, y in each] for colour, each in points.items()}


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"redis_bytes": GIB}, ["Redis 64 GiB", "Redis 1 GiB"]),
        ({"disk_bytes": GIB}, ["disk 0 GiB", "disk 1 GiB"]),
        ({"replicas": 3}, ["2 replicas", "3 replicas"]),
        ({"chunk_size_tokens": 512}, ["chunks of 256", "chunks of 512"]),
        ({"store_after": 2}, ["stored after 1", "stored after 2"]),
        ({"replicas": 3, "store_after": 2}, ["2 replicas, stored after 1", "3 replicas, stored"]),
    ],
)
def test_what_differs_is_a_line_of_its_own(other: dict[str, Any], names: list[str]) -> None:
    """Each goes once through each size of the pool, and has a name beside its colour."""
    rows = [row(pool_bytes=n * GIB, hit_rate=n / 100) for n in (4, 8, 16)]
    rates, dollars = shown.plots(rows + [each._replace(**other, hit_rate=0.4) for each in rows])
    for svg in (rates, dollars):
        lines = lines_of(svg)
        assert [len(each) for each in lines.values()] == [3, 3]
        for points in lines.values():
            across = [x for x, _ in points]
            assert across == sorted({*across})
        keys = re.findall(r'class="key" d="M\d+,(\d+)h20" stroke="(#\w+)"', svg)
        assert [colour for _, colour in keys] == [*lines]
        for (height, _), name in zip(keys, names, strict=True):
            (place,) = re.findall(rf'y="([\d.]+)" text-anchor="start">{name}', svg)
            assert float(place) == int(height) + 4
    (one, _) = shown.plots(rows)
    assert 'class="key"' not in one


def test_an_axis_has_marks_with_values_below_which_nothing_lies() -> None:
    rows = [row(pool_bytes=n * GIB, hit_rate=n / 32, usd_saved_per_month=n - 12) for n in (8, 16)]
    for svg in shown.plots([each._replace(usd_per_month=0.0) for each in rows]):
        marks = re.findall(r'x="50.0" y="([\d.]+)" text-anchor="end">(-?[\d,]+)', svg)
        heights = [float(y) for y, _ in marks]
        values = [int(value.replace(",", "")) for _, value in marks]
        grid = [float(y) for y in re.findall(r'class="grid" d="M56,([\d.]+)H', svg)]
        assert heights == pytest.approx([y + 4 for y in grid], abs=0.06)
        assert len(marks) >= 4
        steps = {b - a for a, b in itertools.pairwise(values)}
        assert len(steps) == 1
        # A point is at its value's height.
        for x, y, _, value in re.findall(
            r'cx="([\d.]+)" cy="([\d.]+)" r="3"[^>]*><title>([^:]*): (-?\d+)', svg
        ):
            assert 56 <= float(x) <= 560
            share = (int(value) - values[0]) / (values[-1] - values[0])
            assert float(y) == pytest.approx(grid[0] + share * (grid[-1] - grid[0]), abs=1)


@given(st.floats(1e-6, 1e12))
def test_marks_are_at_round_values_and_few(most: float) -> None:
    step = shown._step(most)
    digit = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(digit - each) for each in (1, 2, 5)) < 1e-6
    assert 2 <= most / step * 1.002 <= 5.02
