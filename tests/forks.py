"""Processes of `lmcache-redis` that are forked from one that has imported what they need.

The imports take half a second of a core, and the tests start hundreds of agents. Each is a process
of its own, with its own log, environment and signals.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmcache_redis.cli import starting

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lmcache_redis.cli.app", "lmcache_redis.agent.main"])


class Forked:
    """What tests use of a ``subprocess.Popen`` whose output goes to ``log``."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        environment = dict(os.environ)
        if starting.applies():
            # Else the process would replace itself by one that imports everything again. glibc
            # reads it when the server of the forks starts.
            environment.setdefault(starting.TUNABLES_VARIABLE, starting.THRESHOLD_SETTING)
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self._process = _context.Process(
                target=_run, args=([*words], environment, log), daemon=True
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("lmcache-redis", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()


def _run(words: list[str], environment: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.orig_argv = [sys.executable, "-m", "lmcache_redis.cli", *words]
    sys.argv = ["lmcache-redis", *words]
    from lmcache_redis.cli import main

    main()
