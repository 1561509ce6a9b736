"""What the demo says about its measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from demo.report import PromptResult, result_table, write_plot, write_results

GOOD = PromptResult(
    prompt_tokens=4097,
    whole_chunk_tokens=4096,
    cold_s=4.0,
    warm_s=0.25,
    redis_bytes=268_435_456,
    loaded_tokens=4096,
    loaded_bytes=268_435_456,
    cold_output=(1, 2, 3),
    warm_output=(1, 2, 3),
)


def shown(results: list[PromptResult]) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(result_table(results))
    return capture.get()


def test_outputs_are_identical_only_token_for_token() -> None:
    assert GOOD.identical
    assert not dataclasses.replace(GOOD, warm_output=(1, 2, 4)).identical
    assert not dataclasses.replace(GOOD, warm_output=(1, 2)).identical


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


def test_the_rate_is_that_of_the_whole_request() -> None:
    assert GOOD.gigabytes_per_s == pytest.approx(268_435_456 / 0.25 / 1e9)


def test_the_table_says_what_was_measured() -> None:
    text = shown([GOOD, dataclasses.replace(GOOD, warm_s=0.5, warm_output=(9,))])
    row = next(line for line in text.splitlines() if "0.250" in line)
    for figure in ("4.000", "16.0", "4,096", "268", "1.07", "yes"):
        assert figure in row
    assert "0.375" in next(line for line in text.splitlines() if "median" in line)
    assert "NO" in text


def test_results_are_json_with_everything(tmp_path: Path) -> None:
    bad = dataclasses.replace(GOOD, warm_output=(9,))
    document = json.loads(write_results(tmp_path, [GOOD, bad]).read_text())
    assert [prompt["identical"] for prompt in document["prompts"]] == [True, False]
    assert document["identical"] is False
    assert document["loaded"] is True
    assert document["prompts"][0]["cold_output"] == [1, 2, 3]


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = write_plot(tmp_path, [GOOD, GOOD])
    assert path.suffix == ".png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
