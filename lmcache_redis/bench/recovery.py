"""How soon requests go on when something stops, and hit again when it is back.

    redis-stopped   Redis is stopped (SIGSTOP): a lookup begun then, until it is answered
    redis-back      Redis goes on (SIGCONT): until a prefix that only Redis has is a hit
    redis-new       Redis was killed and started again: from its first PONG until the agent uses it
    agent-killed    the agent is killed while a lookup waits for it: until that is answered
    agent-back      from the new agent's exec until it has the engine's memory and a lookup hits

Requests are those of an engine's adapters, without a model: what counts is time added to them.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from lmcache_redis.bench.agent import AgentServer
from lmcache_redis.bench.lookups import CHUNK_TOKENS, hashes_of, simulated_engine, store, wait_for
from lmcache_redis.client.adapter import LMCacheMPWorkerAdapter
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.embedded import find_server_binary

# What is asked of each case, in seconds: the deadline of a lookup is 1 s.
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
    """Rows with the median and the longest of ``rounds`` faults of each kind, in seconds."""
    times: dict[str, list[float]] = {case: [] for case in ASKED_S}
    with (
        tempfile.TemporaryDirectory() as directory,
        _RedisProcess(Path(directory)) as server,
        AgentServer(
            f"ipc://{directory}/agent.sock",
            server.url,
            Path(directory) / "agent.log",
            pool_bytes=256 << 20,
        ) as agent,
        simulated_engine(agent.endpoint) as (scheduler, worker),
    ):
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for case, seconds in _round(number, server, agent, scheduler, worker).items():
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


def _round(
    number: int,
    server: _RedisProcess,
    agent: AgentServer,
    scheduler: LMCacheMPSchedulerAdapter,
    worker: LMCacheMPWorkerAdapter,
) -> dict[str, float]:
    seconds: dict[str, float] = {}
    first, second, third = (hashes_of(f"{number}/{n}", _CHUNKS) for n in range(3))
    for prompt in (first, second, third):
        store(agent, worker, prompt)
    # Its host pool is empty then: a hit comes from Redis.
    agent.restart()
    _wait_hit(scheduler, first)
    server.send(signal.SIGSTOP)
    seconds["redis-stopped"] = _timed(lambda: _lookup(scheduler, second))
    server.send(signal.SIGCONT)
    seconds["redis-back"] = _timed(lambda: _wait_hit(scheduler, second))
    server.send(signal.SIGSTOP)
    scheduler.maybe_submit_lookup_request("open", block_hashes=third)
    # Long enough for the question to be with the agent, short of its deadline.
    time.sleep(0.2)
    agent.kill()
    seconds["agent-killed"] = _timed(lambda: _answer(scheduler, "open"))
    server.send(signal.SIGCONT)

    def start_and_hit() -> None:
        agent.start()
        _wait_hit(scheduler, third)

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


def _lookup(scheduler: LMCacheMPSchedulerAdapter, hashes: list[bytes]) -> int:
    """One lookup, as vLLM's scheduler makes it: tokens that it may load."""
    request_id = f"{time.monotonic_ns()}"
    scheduler.maybe_submit_lookup_request(request_id, block_hashes=hashes)
    return _answer(scheduler, request_id)


def _answer(scheduler: LMCacheMPSchedulerAdapter, request_id: str) -> int:
    while (tokens := scheduler.check_lookup_result(request_id, wait_s=0.05)) is None:
        pass
    scheduler.end_session(request_id)
    return tokens


def _wait_hit(scheduler: LMCacheMPSchedulerAdapter, hashes: list[bytes]) -> None:
    expected = len(hashes) // (CHUNK_TOKENS // 16) * CHUNK_TOKENS
    wait_for(lambda: _lookup(scheduler, hashes) == expected, "a hit", _POLL_S)


class _RedisProcess:
    """A redis-server on a unix socket that can be stopped, killed and started again, empty."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Returns when it answers PING."""
        words = [find_server_binary(), "--port", "0", "--unixsocket", str(self._socket)]
        words += ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "redis-server", _POLL_S)

    def send(self, number: signal.Signals) -> None:
        """A signal; SIGKILL is waited for."""
        if self._process is not None:
            self._process.send_signal(number)
            if number is signal.SIGKILL:
                self._process.wait()

    def _answers(self) -> bool:
        with (
            contextlib.suppress(redis.ConnectionError),
            redis.Redis(unix_socket_path=str(self._socket)) as client,
        ):
            return bool(client.ping())
        return False

    def __enter__(self) -> _RedisProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.send(signal.SIGKILL)
