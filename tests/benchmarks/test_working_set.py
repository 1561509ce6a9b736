# SPDX-License-Identifier: Apache-2.0
"""The benchmark of working sets, without vLLM: prompts, rows, plot, words, and what cases start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.working_set.cases import CASES, running
from benchmarks.working_set.plot import write_plot
from benchmarks.working_set.rows import COLUMNS, Samples
from benchmarks.working_set.workload import CONVERSATIONS, DOCUMENTS, Prompts, scenario_of

SET_BYTES = 256 << 20


def samples_of(scenario: str, case: str) -> Samples:
    samples = Samples(scenario, case, requests=4)
    samples.first_s += [9.0]
    samples.seconds += [2.0, 1.0, 4.0]
    samples.first_token_s += [0.5, 1.5]
    samples.stored_first.append(0.75)
    samples.stored.append(1.0)
    for name in (
        *("cached_tokens", "prompt_tokens", "from_redis_mib"),
        *("agent_cpu_s", "redis_cpu_s", "engine_cpu_s", "hit_chunks_redis"),
    ):
        samples.used[name] += 30
    return samples


def test_documents_stay_and_questions_are_new() -> None:
    scenario = scenario_of(DOCUMENTS, 3, 512, rounds=2)
    prompts = Prompts(scenario)
    rounds = []
    for _ in range(3):
        rounds.append(prompts.next())
        prompts.answered(rounds[-1], [[7]] * 3)
    for each in rounds:
        assert [prompt[:512] for prompt in each] == prompts.texts
    assert len({tuple(prompt) for each in rounds for prompt in each}) == 9
    assert scenario.kept_tokens == 512


def test_conversations_keep_questions_and_answers() -> None:
    scenario = scenario_of(CONVERSATIONS, 2, 512, rounds=2)
    prompts = Prompts(scenario)
    for _ in range(3):
        asked = prompts.next()
        prompts.answered(asked, [[7] * 16, [8] * 16])
    assert prompts.texts == [asked[0] + [7] * 16, asked[1] + [8] * 16]
    assert len(prompts.texts[0]) == scenario.kept_tokens
    assert prompts.warm_up not in prompts.texts


def test_a_row_has_medians_of_rounds_and_means_of_what_was_used() -> None:
    row = samples_of(DOCUMENTS, "small").row()
    assert set(COLUMNS) <= set(row)
    assert (row["round_s"], row["requests_per_s"], row["rounds"]) == (2.0, 2.0, 3)
    assert (row["first_token_mean_s"], row["first_token_worst_s"]) == (1.0, 1.5)
    assert (row["cached_tokens"], row["redis_cpu_s"]) == (10, 10)
    assert row["counters"] == {"hit_chunks_redis": 10}


@pytest.mark.parametrize("left_out", [(), ("lmcache-large", "lmcache-small"), ("none",)])
def test_the_plot_is_a_png(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    rows: list[dict[str, Any]] = [
        samples_of(scenario, case).row()
        for scenario in (DOCUMENTS, CONVERSATIONS)
        for case in CASES
        if case not in left_out
    ]
    path = write_plot(tmp_path / "plot.png", rows, "a machine")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.servers
@pytest.mark.parametrize("name", ["none", "small", "disk"])
def test_what_a_case_starts(tmp_path: Path, name: str) -> None:
    with running(CASES[name], SET_BYTES, 256, tmp_path / "log") as stack:
        stack.wait_idle()
        assert stack.stored_bytes() == 0
        assert (stack.cache is None) == (name == "none")
        usage = stack.usage()
        assert usage["redis_cpu_s"] >= 0
        assert (usage["agent_cpu_s"] > 0) == (name != "none")
        assert ("lookup_chunks" in usage) == (name != "none")
