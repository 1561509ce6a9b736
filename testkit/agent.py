# SPDX-License-Identifier: Apache-2.0
"""An agent in a process of its own, as a user runs one: for the demo, the benchmarks and tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lmcache_redis.client.control import AgentUnreachable, ControlClient
from lmcache_redis.config import endpoint_path
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process
from lmcache_redis.settings import option_name

_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_IDLE_TIMEOUT_S = 60.0
_ENGINE_TIMEOUT_S = 30.0
_POLL_S = 0.005
_LOG_TAIL_LINES = 15
_Self = TypeVar("_Self", bound="AgentServer")


class AgentFailed(LMCacheRedisError):
    """The agent ended or timed out; the message ends with the tail of its log."""


class AgentServer:
    """`lmcache-redis agent` with some settings. A context manager: ready on entry, ended on exit.

    settings: names and values of ``AgentConfig``; a None is left out, a True is a flag.
    ``start_seconds`` is the time from starting the process to its first answer.
    """

    def __init__(
        self, endpoint: str, redis_url: str | None, log_path: Path, **settings: Any
    ) -> None:
        self.endpoint = endpoint
        self.log_path = log_path
        self.start_seconds = 0.0
        self._settings = {"endpoint": endpoint, "redis_url": redis_url, **settings}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def spawn(self: _Self) -> _Self:
        """Starts the process; does not wait until it answers."""
        words = ["agent"]
        for name, value in self._settings.items():
            if value is not None:
                words += [option_name(name), *([] if value is True else [str(value)])]
        self._process = self._spawn(words)
        return self

    def _spawn(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lmcache_redis.cli", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start(self: _Self) -> _Self:
        """Starts the process and waits until it answers. Raises ``AgentFailed``."""
        started_s = time.monotonic()
        self.spawn()
        try:
            self._wait(self._answers, _START_TIMEOUT_S, "was not ready")
        except BaseException:
            self.end()
            raise
        self.start_seconds = time.monotonic() - started_s
        return self

    def end(self) -> None:
        """SIGTERM, then SIGKILL if the agent does not end in time. May be called again."""
        if self._process is not None:
            end_process(self._process, _END_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self: _Self) -> _Self:
        """Ends the agent and starts another one, whose host pool is empty."""
        self.end()
        return self.start()

    def status(self) -> dict[str, Any]:
        return ControlClient(self.endpoint, timeout_s=10.0).status()

    def counters(self) -> dict[str, int]:
        """The agent's counters since it started."""
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def wait_idle(self) -> None:
        """Waits until every chunk stored so far is in Redis or was dropped."""
        self._wait(
            lambda: not any(self.status()["queues"].values()), _IDLE_TIMEOUT_S, "was still writing"
        )

    def wait_engine(self) -> None:
        """Waits until an engine is registered, so that its requests can hit."""
        self._wait(
            lambda: any(engine["ready"] for engine in self.status()["engines"]),
            _ENGINE_TIMEOUT_S,
            "saw no engine",
        )

    def _wait(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise self._failed("has ended")
            if time.monotonic() > deadline_s:
                raise self._failed(f"{otherwise} after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        # A client that finds no agent pauses before it connects again.
        if not endpoint_path(self.endpoint).exists():
            return False
        try:
            ControlClient(self.endpoint, timeout_s=0.5).ping()
        except AgentUnreachable:
            return False
        return True

    def _failed(self, how: str) -> AgentFailed:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return AgentFailed("\n".join([f"the agent {how}; the end of {self.log_path}:", *lines]))

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()
