# SPDX-License-Identifier: Apache-2.0
"""What the demo says about its measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from demo.report import (
    Result,
    Stored,
    answer_table,
    saved,
    time_table,
    write_plot,
    write_results,
)

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


def test_answers_are_identical_only_letter_for_letter() -> None:
    assert GOOD.identical
    assert not dataclasses.replace(GOOD, warm_answer=" Ada Bake").identical
    assert not dataclasses.replace(GOOD, warm_answer=" Ada baker").identical


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


def test_what_was_saved_is_tokens_and_seconds() -> None:
    said = saved([GOOD, BAD])
    assert "8,192 of 8,194 prompt tokens" in said
    assert " 7.2 s " in said  # 2 x 4.0, less 0.25 and 0.5


def test_results_are_json_with_everything(tmp_path: Path) -> None:
    document = json.loads(write_results(tmp_path, "a model", STORED, [GOOD, BAD]).read_text())
    assert [each["identical"] for each in document["questions"]] == [True, False]
    assert document["identical"] is False
    assert document["loaded"] is True
    assert document["model"] == "a model"
    assert document["stored_bytes"] == 75_000_000
    assert "75 MB of KV: 25% smaller than the 100 MB" in str(STORED)
    assert document["questions"][0]["cold_answer"] == " Ada Baker"


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = write_plot(tmp_path, "a model", [GOOD, GOOD])
    assert path.suffix == ".png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
