# SPDX-License-Identifier: Apache-2.0
"""The benchmark of working sets, without vLLM: prompts, rows, plot, words, and what cases start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.servers import ServerFailed
from benchmarks.working_set import run
from benchmarks.working_set.cases import CASES, Case, running
from benchmarks.working_set.plot import write_plot
from benchmarks.working_set.rows import COLUMNS, Samples
from benchmarks.working_set.workload import CONVERSATIONS, DOCUMENTS, Prompts, scenario_of
from demo.model import CPU_SHAPE
from testkit.engine import Answer

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


class FakeStack:
    """Half of the set is stored until single prompts are asked for."""

    def __init__(self, case: Case) -> None:
        self.cache = None if case.name == "none" else "a cache"
        self.asked: list[int] = []

    def wait_idle(self) -> None:
        pass

    def stored_bytes(self) -> int:
        prompts = 5 * 512 * CPU_SHAPE.kv_bytes_per_token
        return prompts if self.asked.count(1) > 1 else prompts // 2

    def usage(self) -> dict[str, float]:
        used = 2.0 * len(self.asked)
        return {"agent_cpu_s": used, "redis_cpu_s": used, "from_redis_mib": used}


class FakeEngine:
    process = SimpleNamespace(pid=os.getpid(), kill=lambda: None)

    def __init__(self, case: Case, stack: FakeStack) -> None:
        self._case, self._stack = case, stack

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Answer:
        self._stack.asked.append(len(prompts))
        token = 9 if self._case.name == "large" and len(self._stack.asked) == 2 else 5
        details = {"first_token_s": [0.1] * len(prompts), "cached_tokens": [7] * len(prompts)}
        return Answer(1.0, [[token] * max_tokens for _ in prompts], details)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[FakeStack]]:
    """No process is started: the stacks of each case. LMCache is not there."""
    made: dict[str, list[FakeStack]] = {}

    @contextlib.contextmanager
    def started(case: Case, set_bytes: int, chunk_tokens: int, log: Path) -> Iterator[FakeStack]:
        if case.lmcache:
            raise ServerFailed("it is not there")
        made.setdefault(case.name, []).append(FakeStack(case))
        yield made[case.name][-1]

    @contextlib.contextmanager
    def engine(runner: object, case: Case, stack: FakeStack) -> Iterator[FakeEngine]:
        yield FakeEngine(case, stack)

    monkeypatch.setattr(run, "running", started)
    monkeypatch.setattr(run._Runner, "_engine", engine)
    monkeypatch.setattr(run, "make_model", lambda *_: None)
    return made


def test_a_run(stacks: dict[str, list[FakeStack]], tmp_path: Path) -> None:
    said: list[str] = []
    options = run.Options(
        rounds=2, documents=4, document_tokens=512, repeat=2, scenarios=(DOCUMENTS,)
    )
    rows = {row["case"]: row for row in run.run(tmp_path, options, said.append)}
    assert [*rows] == ["none", "own", "large", "small", "disk"]
    assert [line for line in said if "left out" in line] == [
        f"{name}: left out: it is not there" for name in ("lmcache-large", "lmcache-small")
    ]
    # A warm-up, a round, everything that was not stored one by one, and two rounds.
    assert [stack.asked for stack in stacks["small"]] == [[1, 4, 1, 1, 1, 1, 4, 4]] * 2
    assert [stack.asked for stack in stacks["none"]] == [[1, 4, 4, 4]] * 2
    row = rows["small"]
    assert (row["rounds"], row["requests_per_s"], row["cached_tokens"]) == (4, 4.0, 28)
    assert (row["agent_cpu_s"], row["from_redis_mib"]) == (2.0, 2.0)
    assert (row["stored_first"], row["stored"]) == (0.5, 1.0)
    # Another answer in the first round of each repetition.
    assert {case: row["mismatches"] for case, row in rows.items() if row["mismatches"]} == {
        "large": 2 * 4
    }
