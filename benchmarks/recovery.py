# SPDX-License-Identifier: Apache-2.0
"""How soon requests continue after Redis or the agent stops, and hit after its return.

    redis-stopped   after SIGSTOP of Redis: until a lookup is answered
    redis-back      after SIGCONT of Redis: until a prefix that only Redis has is a hit
    redis-new       after Redis was killed and accepts connections again: until the agent uses it
    agent-killed    after the agent is killed during a lookup: until the lookup is answered
    agent-back      from the exec of the new agent until it has mapped the engine and a lookup hits

The requests are those of an engine without a model: the figures are the time added to them.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import CHUNK_TOKENS, Engine
from benchmarks.lookups import SMALL
from benchmarks.servers import RedisProcess, wait_for
from testkit.agent import AgentServer

# The target of each case in seconds. The deadline of a lookup is 1 s.
ASKED_S = {
    "redis-stopped": 1.0,
    "redis-back": 1.0,
    "redis-new": 1.0,
    "agent-killed": 2.0,
    "agent-back": 3.0,
}
_CHUNKS = 4
_POLL_S = 0.002


def run(rounds: int = 5, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Rows with the median and the maximum of ``rounds`` faults of each kind, in seconds."""
    times: dict[str, list[float]] = {case: [] for case in ASKED_S}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisProcess(directory))
        endpoint, log = f"ipc://{directory}/agent.sock", directory / "agent.log"
        agent = AgentServer(endpoint, server.url, log, pool_bytes=256 << 20)
        stack.enter_context(agent)
        engine = stack.enter_context(contextlib.closing(Engine(agent, SMALL, _CHUNKS)))
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for case, seconds in _round(server, agent, engine).items():
                times[case].append(seconds)
    return [
        {
            "case": case,
            "median_s": statistics.median(seconds),
            "max_s": max(seconds),
            "asked_s": ASKED_S[case],
            "rounds": len(seconds),
        }
        for case, seconds in times.items()
    ]


def _round(server: RedisProcess, agent: AgentServer, engine: Engine) -> dict[str, float]:
    seconds: dict[str, float] = {}
    first, second, third = (engine.store()[1] for _ in range(3))
    agent.wait_idle()
    # With an empty host pool, a hit comes from Redis.
    agent.restart()
    _wait_hit(engine, first)
    server.send(signal.SIGSTOP)
    seconds["redis-stopped"] = _timed(lambda: engine.lookup(second))
    server.send(signal.SIGCONT)
    seconds["redis-back"] = _timed(lambda: _wait_hit(engine, second))
    server.send(signal.SIGSTOP)
    engine.ask("open", third)
    # Long enough for the lookup to reach the agent, shorter than its deadline.
    time.sleep(0.2)
    agent.kill()
    seconds["agent-killed"] = _timed(lambda: engine.answer("open"))
    engine.scheduler.end_session("open")
    server.send(signal.SIGCONT)

    def start_and_hit() -> None:
        agent.start()
        _wait_hit(engine, third)

    seconds["agent-back"] = _timed(start_and_hit)
    server.send(signal.SIGKILL)
    wait_for(lambda: not agent.status()["redis"]["up"], "the agent to see Redis gone")
    server.start()
    seconds["redis-new"] = _timed(
        lambda: wait_for(lambda: agent.status()["redis"]["up"], "Redis", _POLL_S)
    )
    return seconds


def _timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def _wait_hit(engine: Engine, hashes: list[bytes]) -> None:
    wait_for(lambda: engine.lookup(hashes) == _CHUNKS * CHUNK_TOKENS, "a hit", _POLL_S)
