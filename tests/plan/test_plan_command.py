# SPDX-License-Identifier: Apache-2.0
"""`lmcache-redis plan`: its table, JSON and page, and what it says and draws of given rows."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmcache_redis.cli.app import app
from lmcache_redis.errors import ConfigError
from lmcache_redis.plan import shown
from lmcache_redis.plan.figures import PlanRow

DOCS = Path(__file__).parents[2] / "docs"


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    run("--example", path, "--example-requests", 300)
    return path


def test_rows_have_each_size_with_each(trace: Path) -> None:
    document = json.loads(
        run(
            *(trace, "--json", "--pool-bytes", "8GiB,16GiB", "--redis-bytes", "0,1TiB"),
            *("--replicas", "1,2", "--chunk-size-tokens", "512,1024", "--disk-size", "0,100GiB"),
            *("--prefill-tokens-per-s", 5000, "--link-gbit", 100),
        )
    )
    rows: list[dict[str, Any]] = document["rows"]
    assert len(rows) == 2**5
    assert {row["chunk_size_tokens"] for row in rows} == {512, 1024}
    assert {(row["pool_bytes"], row["redis_bytes"]) for row in rows} == {
        (pool << 30, redis) for pool in (8, 16) for redis in (0, 1 << 40)
    }
    for row in rows:
        tiers = sum(row[f"hit_rate_{tier}"] for tier in ("pool", "disk", "redis"))
        assert row["hit_rate"] == pytest.approx(tiers)
        assert 0 < row["prefill_s_saved"] <= row["gpu_s_saved"]
        assert row["gpu_s_saved"] == pytest.approx(row["hit_tokens"] / 5000)
    assert document["trace"]["requests"] == 300
    assert document["assumed"]["link to Redis"].startswith("12,500 MB/s")


def test_packing_makes_redis_larger_and_the_link_faster(trace: Path) -> None:
    sizes = (trace, "--pool-bytes", "8GiB", "--json")
    packed, same, plain = (
        json.loads(run(*sizes, "--redis-bytes", size, "--link-gbit", gbit, *more))
        for size, gbit, more in (
            ("40GiB", 2, ("--redis-ratio", 1.5)),
            ("60GiB", 3, ()),
            ("40GiB", 2, ()),
        )
    )
    assert packed["assumed"]["KV"] == f"{plain['assumed']['KV']}, 1.5 times smaller in Redis"
    (packed,), (same,), (plain,) = (each["rows"] for each in (packed, same, plain))
    smaller = ("stored_bytes", "link_bytes_per_s", "link_peak_bytes_per_s")
    for name in smaller:
        assert packed[name] == pytest.approx(same[name] / 1.5)
    prices = {name for name in packed if name.startswith("usd")}
    for name in {*packed} - {*smaller, *prices, "redis_bytes", "redis_ratio"}:
        assert packed[name] == pytest.approx(same[name]), name
    assert packed["usd_per_month"] == plain["usd_per_month"]
    assert packed["hit_rate"] > plain["hit_rate"]
    assert packed["stored_bytes"] < plain["stored_bytes"]


def test_what_storing_later_saves_and_loses_is_said(trace: Path) -> None:
    sizes = (trace, "--pool-bytes", "8GiB", "--redis-bytes", "256GiB")
    said = re.search(
        r"With --store-after 2 .* write (\d+)% less .* 256 GiB .* (\d+\.\d)% instead of (\d+\.\d)%",
        run(*sizes),
    )
    assert said is not None
    rows = json.loads(run(*sizes, "--store-after", "1,2", "--json"))["rows"]
    all_, less = sorted(rows, key=lambda row: row["store_after"])
    assert f"{1 - less['stored_bytes'] / all_['stored_bytes']:.0%}" == f"{said[1]}%"
    assert [f"{row['hit_rate']:.1%}" for row in (less, all_)] == [f"{said[2]}%", f"{said[3]}%"]
    assert 0 < less["stored_bytes"] < all_["stored_bytes"]
    table = run(*sizes, "--store-after", "1,2")
    assert "stored GiB" in table
    assert "With --store-after" not in table


def test_the_page_loads_nothing_and_its_plots_are_whole(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = run(trace, "--html", page, "--pool-bytes", "8GiB,32GiB", "--redis-bytes", "0,256GiB")
    assert f"page: {page}" in text
    html = page.read_text()
    assert "<script" not in html
    assert not re.search(r"(src|href)\s*=|url\(|@import", html)
    assert re.findall(r"https?://[^\"']+", html) == ["http://www.w3.org/2000/svg"] * 2
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.S)]
    lines = [
        [p for p in svg.iter("{http://www.w3.org/2000/svg}path") if p.get("stroke-width")]
        for svg in plots
    ]
    assert [len(each) for each in lines] == [2, 2]
    # Every point lies in its picture.
    for svg in plots:
        for dot in svg.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(dot.get("cx", "-1")) <= 560
            assert 0 <= float(dot.get("cy", "-1")) <= 300 - 44
        # The legend is below the axis, in the picture.
        keys = [p for p in svg.iter("{http://www.w3.org/2000/svg}path") if p.get("class") == "key"]
        heights = [float(key.get("d", "").partition(",")[2].partition("h")[0]) for key in keys]
        assert len(heights) == 2
        assert 300 <= min(heights) < max(heights) < float(svg.get("height", "0"))
    assert "@media(prefers-color-scheme:dark)" in html
    assert html.count("<tr") == 1 + 4
    assert html.count("<tr class=best>") == 1


def test_sizes_that_double_are_equally_far_apart(trace: Path, tmp_path: Path) -> None:
    sizes = ("--pool-bytes", "0,8GiB,16GiB,32GiB", "--redis-bytes", "64GiB")
    run(trace, "--html", tmp_path / "plan.html", *sizes)
    svg = re.findall(r"<svg.*?</svg>", (tmp_path / "plan.html").read_text(), re.S)[0]
    at = [float(each) for each in re.findall(r'cx="([\d.]+)"', svg)]
    assert len(at) == 4
    assert [b - a for a, b in itertools.pairwise(at)] == pytest.approx([at[1] - at[0]] * 3, abs=0.2)


def test_the_page_of_the_docs_is_todays(tmp_path: Path) -> None:
    """Its table, what follows from it, and the plot."""
    text = run("--example", tmp_path / "trace.jsonl", "--html", tmp_path / "plan.html")
    html, page = (tmp_path / "plan.html").read_text(), (DOCS / "plan.md").read_text()
    rows = json.loads(run(tmp_path / "trace.jsonl", "--json"))["rows"]
    found = [PlanRow(**row) for row in rows]
    columns = [
        *("pool GiB", "Redis GiB", "hit rate", "pool", "Redis", "GPU s saved", "link MB/s"),
        *("$ a month", "$ saved", "$ net"),
    ]
    header, *lines = re.search(r"```\n(pool GiB.*?)```", page, re.S)[1].splitlines()
    assert re.split("  +", header.strip()) == columns
    cells = [[shown.COLUMNS[column](row) for column in columns] for row in found]
    for line in lines[:-1]:
        assert line.split() in cells
    assert lines[-1] in text
    assert (DOCS / "plan.svg").read_text().strip() in html, (
        "docs/plan.svg is not what `plan` draws: copy the first <svg> of --html there"
    )


def test_names_in_a_page_are_escaped(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "<b>&.jsonl"
    other.write_bytes(trace.read_bytes())
    page = tmp_path / "plan.html"
    run(other, "--html", page)
    assert "<b>" not in page.read_text()
    assert "&lt;b&gt;&amp;.jsonl" in page.read_text()


def test_without_reuse_nothing_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"hash_ids": [2 * n, 2 * n + 1]}) for n in range(20)))
    text = run(path, "--html", tmp_path / "page.html")
    assert "saves nothing" in text
    assert "has no times" in text


def test_without_times_the_best_is_the_cheapest_that_is_near(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"hash_ids": [n % 4]}) for n in range(40)))
    assert "Cheapest of what has 95 % of the highest hit rate: 1 GiB of host pool" in run(
        path, "--pool-bytes", "1GiB,2GiB", "--redis-bytes", "0"
    )


def test_a_cache_that_costs_more_than_it_saves_is_said_to(trace: Path) -> None:
    text = run(trace, "--usd-per-gib-month", 10_000)
    assert "At these prices no row saves more than it costs" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--example FILE"),
        (["--pool-bytes", "8GiB,"], "--pool-bytes is '8GiB,'"),
        (["--pool-bytes", "much"], "--pool-bytes: 'much' is not a size"),
        (["--replicas", "0"], "--replicas is '0'"),
        (["--chunk-size-tokens", "300"], "--chunk-size-tokens 300: .*blocks of 512"),
        (["--html", "/nowhere/page.html"], "--html /nowhere/page.html cannot be written"),
    ],
)
def test_wrong_options_are_named(trace: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(*([trace, *words] if words else []))


# --------------------------------------------------------------- given rows


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
