"""An agent in a process of its own, as a user would run one: for the demo and the benchmarks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lmcache_redis.client.control import AgentUnreachable, ControlClient
from lmcache_redis.config import option_name
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0
_IDLE_TIMEOUT_S = 60.0
_ENGINE_TIMEOUT_S = 30.0
_POLL_S = 0.005
_LOG_TAIL_LINES = 15


class AgentFailed(LMCacheRedisError):
    """The agent ended or fell silent; the message ends with its log."""


class AgentServer:
    """`lmcache-redis agent` with some settings. A context manager: ready on entry, ended on exit.

    endpoint: its directory is made if need be. settings: names and values of ``AgentConfig``.
    ``start_seconds`` is the time from starting the process to its first answer.
    """

    def __init__(self, endpoint: str, redis_url: str, log_path: Path, **settings: Any) -> None:
        self.endpoint = endpoint
        self.start_seconds = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = {"endpoint": endpoint, "redis_url": redis_url, **settings}
        self.log_path = log_path
        self._control = ControlClient(endpoint, timeout_s=5.0)

    def start(self) -> AgentServer:
        """Starts the process and waits until it answers. Raises ``AgentFailed``."""
        words = [sys.executable, "-m", "lmcache_redis.cli", "agent"]
        for name, value in self._settings.items():
            words += [option_name(name), str(value)]
        started_s = time.monotonic()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait_ready(self.process, started_s + _START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started_s
        return self

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough. May be called again."""
        process, self.process = self.process, None
        if process is not None:
            end_process(process, _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL: as a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Ends it and starts another: its host pool is empty then."""
        self.stop()
        self.start()

    def status(self) -> dict[str, Any]:
        """The agent's STATUS document."""
        return self._control.status()

    def counters(self) -> dict[str, int]:
        """The agent's counters since it started."""
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def wait_idle(self) -> None:
        """Waits until every chunk handed over so far is in Redis or was dropped."""
        deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
        while any(self.status()["queues"].values()):
            if time.monotonic() > deadline_s:
                raise self._failed(f"was still writing after {_IDLE_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def wait_engine(self) -> None:
        """Waits until an engine that was started can hit: it says so to the agent by itself."""
        deadline_s = time.monotonic() + _ENGINE_TIMEOUT_S
        while not any(engine["ready"] for engine in self.status()["engines"]):
            if time.monotonic() > deadline_s:
                raise self._failed(f"saw no engine within {_ENGINE_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline_s: float) -> None:
        while not self._answers():
            if process.poll() is not None:
                raise self._failed("has ended")
            if time.monotonic() > deadline_s:
                raise self._failed(f"was not ready within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            ControlClient(self.endpoint, timeout_s=0.5).ping()
        except AgentUnreachable:
            return False
        return True

    def _failed(self, how: str) -> AgentFailed:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return AgentFailed("\n".join([f"the agent {how}; the end of {self.log_path}:", *lines]))

    def __enter__(self) -> AgentServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
