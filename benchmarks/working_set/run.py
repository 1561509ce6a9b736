# SPDX-License-Identifier: Apache-2.0
"""Runs the cases, one after the other; the order is reversed in every second repetition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.report import machine, show, write_json
from benchmarks.servers import cpu_s
from benchmarks.working_set.cases import CASES, Case, Stack, running
from benchmarks.working_set.plot import write_plot
from benchmarks.working_set.rows import COLUMNS, Samples
from benchmarks.working_set.workload import SCENARIOS, Prompts, Scenario, scenario_of
from demo.model import CPU_SHAPE, make_model
from lmcache_redis.errors import LMCacheRedisError
from testkit.engine import Answer, EngineProcess

_BLOCK_TOKENS = 32
# A small pool also drops chunks of a request that comes alone.
_MOST_FILLS = 3
# A round that takes longer hangs.
_ROUND_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    """documents: also the number of conversations. rounds: without the first."""

    rounds: int = 5
    documents: int = 16
    document_tokens: int = 2048
    chunk_tokens: int = 256
    repeat: int = 1
    cases: Sequence[str] = tuple(CASES)
    scenarios: Sequence[str] = SCENARIOS


def run(
    output_dir: Path, options: Options, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """One row per scenario and case. Logs and the model go to ``output_dir``."""
    output_dir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in options.scenarios:
        sizes = (options.documents, options.document_tokens, options.rounds)
        scenario = scenario_of(name, *sizes)
        rows += _Runner(output_dir, scenario, options.chunk_tokens, say).run(options)
    return rows


def report(rows: Sequence[dict[str, Any]], plot: Path, json: Path | None) -> None:
    """Prints the table, and writes the plot and the rows."""
    show("working set", [{text: row[name] for name, text in COLUMNS.items()} for row in rows])
    write_json(json, rows)
    facts = machine()
    caption = f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    plots.report(lambda: write_plot(plot, rows, caption))


@dataclass(slots=True)
class _Runner:
    """The cases of one scenario. expected: what the first case answered, by round."""

    output_dir: Path
    scenario: Scenario
    chunk_tokens: int
    say: Callable[[str], None]
    expected: dict[int, list[list[int]]] = field(default_factory=dict)

    def run(self, options: Options) -> list[dict[str, Any]]:
        make_model(self.output_dir / "model", CPU_SHAPE, self.scenario.most_tokens)
        samples = {
            name: Samples(self.scenario.name, name, self.scenario.texts) for name in options.cases
        }
        for repetition in range(options.repeat):
            for name in [*samples][:: -1 if repetition % 2 else 1]:
                if not self._takes_part(CASES[name], samples[name]):
                    del samples[name]
        return [each.row() for each in samples.values()]

    def _takes_part(self, case: Case, samples: Samples) -> bool:
        """Measures a case; False for a peer that is not there or fails."""
        try:
            self._measure(case, samples)
        except LMCacheRedisError as error:
            if not case.lmcache:
                raise
            self.say(f"{case.name}: left out: {error}")
            return False
        return True

    @property
    def _set_bytes(self) -> int:
        tokens = self.scenario.texts * self.scenario.kept_tokens
        return tokens * CPU_SHAPE.kv_bytes_per_token

    def _measure(self, case: Case, samples: Samples) -> None:
        log = self.output_dir / f"working-set-{case.name}.log"
        started = running(case, self._set_bytes, self.chunk_tokens, log)
        with started as stack, self._engine(case, stack) as engine:
            _Measurement(self, case, samples, stack, engine).run()

    @contextmanager
    def _engine(self, case: Case, stack: Stack) -> Iterator[EngineProcess]:
        cache = stack.cache
        kept = self.scenario.texts * self.scenario.kept_tokens
        with EngineProcess(
            self.output_dir / "model",
            log_path=self.output_dir / f"working-set-{case.name}-engine.log",
            kv_transfer=None if cache is None else cache.kv_transfer,
            env=None if cache is None else cache.environment,
            options={
                "dtype": CPU_SHAPE.dtype,
                "max_model_len": self.scenario.most_tokens,
                "disable_log_stats": False,
                "block_size": _BLOCK_TOKENS,
                "num_gpu_blocks_override": int(case.blocks * kept) // _BLOCK_TOKENS + 16,
            },
        ) as engine:
            if cache is not None:
                cache.wait_engine()
            yield engine


@dataclass(slots=True)
class _Measurement:
    """All rounds of one case. lengths: of the prompts that should be stored, in tokens."""

    runner: _Runner
    case: Case
    samples: Samples
    stack: Stack
    engine: EngineProcess
    lengths: list[int] = field(default_factory=list)

    def run(self) -> None:
        prompts, samples = Prompts(self.runner.scenario), self.samples
        self._ask([prompts.warm_up])
        samples.first_s.append(self._round(prompts, 0).seconds)
        samples.stored_first.append(self._stored())
        self._store_the_rest(prompts)
        before = self._usage()
        for number in range(1, self.runner.scenario.rounds + 1):
            answer = self._round(prompts, number)
            samples.seconds.append(answer.seconds)
            samples.first_token_s += answer.details["first_token_s"]
            samples.used["cached_tokens"] += sum(answer.details["cached_tokens"])
        for name, amount in self._usage().items():
            samples.used[name] += amount - before.get(name, 0)
        samples.stored.append(self._stored())

    def _round(self, prompts: Prompts, number: int) -> Answer:
        scenario = self.runner.scenario
        self.runner.say(f"{scenario.name}, {self.case.name}, round {number} of {scenario.rounds}")
        asked = prompts.next()
        self.lengths = [len(prompt) for prompt in (prompts.warm_up, *asked)]
        answer = self._ask(asked)
        expected = self.runner.expected.setdefault(number, answer.outputs)
        self.samples.mismatches += sum(
            found != wanted for found, wanted in zip(answer.outputs, expected, strict=True)
        )
        if number:
            self.samples.used["prompt_tokens"] += sum(map(len, asked))
        # The same in every case, so that an answer that differs does not change later prompts.
        prompts.answered(asked, expected)
        return answer

    def _store_the_rest(self, prompts: Prompts) -> None:
        """Asks for everything again, so that the next rounds measure loading."""
        for _ in range(_MOST_FILLS):
            if self.stack.cache is None or self._stored() >= 1:
                return
            self.runner.say(f"{self.case.name}: storing what is not in Redis yet")
            for text in prompts.texts:
                self._ask([text])

    def _ask(self, prompts: list[list[int]]) -> Answer:
        """The engine's answer, after all stores. Ends an engine that hangs."""
        watchdog = threading.Timer(_ROUND_TIMEOUT_S, self.engine.process.kill)
        watchdog.start()
        try:
            answer = self.engine.generate(prompts, self.runner.scenario.answer_tokens)
        finally:
            watchdog.cancel()
        self.stack.wait_idle()
        return answer

    def _usage(self) -> dict[str, float]:
        return self.stack.usage() | {"engine_cpu_s": cpu_s(self.engine.process.pid)}

    def _stored(self) -> float:
        """The share of the whole chunks of all prompts so far that is in Redis, at most 1."""
        chunk_tokens = self.runner.chunk_tokens
        whole = sum(length // chunk_tokens * chunk_tokens for length in self.lengths)
        return min(1.0, self.stack.stored_bytes() / (whole * CPU_SHAPE.kv_bytes_per_token))
