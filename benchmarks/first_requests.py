# SPDX-License-Identifier: Apache-2.0
"""The first requests that a new agent answers, by the rate of the link: beside computing alone.

An agent that has just started knows neither its link nor its engine. Two engines of one small
model, one of them without a connector, answer the same prompts one after another, each engine all
of them in its turn. All chunks are in a Redis behind a link that a token bucket limits (`link`).
The agent is started right before the turn of its engine, and ends behind it. That pause does not
count: after 1.5 s of idle time the engine without a connector is as fast as without.
The engines keep their heaps (`testkit.engine.KEPT_HEAP`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.link import LimitedLink
from benchmarks.report import rotated
from benchmarks.slow_link import SHAPE
from demo.model import make_model, make_prompts
from testkit.agent import AgentServer
from testkit.engine import KEPT_HEAP, EngineProcess

REQUESTS = 6
PLAIN, ADAPTIVE = "no connector", "adaptive"


def run(
    output_dir: Path,
    rounds: int = 5,
    prompt_tokens: int = 2049,
    mbits: Sequence[float] = (10_000, 300, 100, 20),
    pause_s: float = 0.0,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One row for each rate: of each request the median over ``rounds`` new agents.

    ``plain_s`` is of all requests of the engine that computes. Columns ``to_plain_N`` compare each
    with the same one of that engine: its first one is slower than the others, too.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    make_model(output_dir / "small-model", SHAPE, prompt_tokens + 64)
    prompts = make_prompts(REQUESTS + 3, prompt_tokens)
    warm_up, prompts = prompts[REQUESTS:], prompts[:REQUESTS]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        link = stack.enter_context(LimitedLink(Path(directory)))
        endpoint = f"ipc://{directory}/agent.sock"
        agent = AgentServer(endpoint, link.url, output_dir / "agent.log")
        stack.enter_context(agent)
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    output_dir / "small-model",
                    log_path=output_dir / f"{name}.log",
                    connector_endpoint=endpoint if name == ADAPTIVE else None,
                    options={"dtype": SHAPE.dtype, "max_model_len": prompt_tokens + 64},
                    env=KEPT_HEAP,
                )
            )
            for name in (PLAIN, ADAPTIVE)
        }
        agent.wait_engine()
        for engine in engines.values():
            for prompt in [*prompts, *warm_up]:
                engine.generate([prompt])
        agent.wait_idle()
        agent.end()
        rows = []
        for mbit in mbits:
            link.limit(mbit)
            times: dict[str, list[list[float]]] = {name: [] for name in engines}
            for number in range(rounds):
                say(f"{mbit:g} Mbit/s, agent {number + 1} of {rounds}")
                for name in rotated([*engines], number):
                    engines[name].reset_prefix_cache()
                    if name == ADAPTIVE:
                        agent.start().wait_engine()
                    times[name].append(_ask(engines[name], prompts, pause_s))
                    if name == ADAPTIVE:
                        agent.end()
            rows.append(_row(mbit, times))
        return rows


def _ask(engine: EngineProcess, prompts: Sequence[Sequence[int]], pause_s: float) -> list[float]:
    seconds = []
    for prompt in prompts:
        time.sleep(pause_s)
        seconds.append(engine.generate([prompt]).seconds)
    return seconds


def _row(mbit: float, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    plain_s = statistics.median(seconds for each in times[PLAIN] for seconds in each)
    row: dict[str, Any] = {"mbit_per_s": mbit, "plain_s": plain_s}
    medians = {
        name: [statistics.median(s) for s in zip(*each, strict=True)]
        for name, each in times.items()
    }
    for number, (plain, ours) in enumerate(
        zip(medians[PLAIN], medians[ADAPTIVE], strict=True), start=1
    ):
        row[f"to_plain_{number}"] = ours / plain
    return row
