# SPDX-License-Identifier: Apache-2.0
"""What the demo says about its measurements."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console
from rich.table import Table

from demo.report import Result, Stored, answer_table, saved, time_table

GOOD = Result(
    question="Who owns the shop?",
    prompt_tokens=4097,
    whole_chunk_tokens=4096,
    cold_s=4.0,
    warm_s=0.25,
    redis_bytes=268_435_456,
    loaded_tokens=4096,
    loaded_bytes=268_435_456,
    cold_answer=" Ada Baker",
    warm_answer=" Ada Baker",
)


STORED = Stored(stored_bytes=75_000_000, plain_bytes=100_000_000)
BAD = dataclasses.replace(GOOD, warm_s=0.5, warm_answer=" Ben Hill")


def shown(table: Table) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(
    "short",
    [
        {"loaded_tokens": 4096 - 256},
        {"redis_bytes": 0},
        {"redis_bytes": 268_435_455},
        {"loaded_tokens": 0, "loaded_bytes": 0, "redis_bytes": 0},
        {"whole_chunk_tokens": 0},
    ],
    ids=["a chunk less", "not from Redis", "partly not from Redis", "nothing", "no chunk"],
)
def test_loaded_means_every_whole_chunk_and_from_redis(short: dict[str, int]) -> None:
    assert GOOD.loaded
    assert GOOD.identical
    assert not BAD.identical
    assert not dataclasses.replace(GOOD, **short).loaded


def test_the_answers_stand_side_by_side() -> None:
    one, other = (line for line in shown(answer_table([GOOD, BAD])).splitlines() if "Ada" in line)
    assert one.count("Ada Baker") == 2
    assert "yes" in one
    assert "Ada Baker" in other
    assert "Ben Hill" in other
    assert "NO" in other


def test_the_times_are_those_measured() -> None:
    text = shown(time_table([GOOD, BAD]))
    row = next(line for line in text.splitlines() if "0.250" in line)
    for figure in ("4.000", "16.0", "4,097", "4,096", "268"):
        assert figure in row
    assert "0.375" in next(line for line in text.splitlines() if "median" in line)
    assert "8,192" in next(line for line in text.splitlines() if "all" in line)
    said = saved([GOOD, BAD])
    assert "8,192 of 8,194 prompt tokens" in said
    assert " 7.2 s " in said  # 2 x 4.0, less 0.25 and 0.5
    assert "75 MB of KV: 25% smaller than the 100 MB" in str(STORED)
