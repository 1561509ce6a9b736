# SPDX-License-Identifier: Apache-2.0
"""Processes of `lmcache-redis` that are forked from one that has imported what they need.

The imports take half a second of a core, and the tests start hundreds of agents. Each is a process
of its own, with its own log, environment and signals.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path

from lmcache_redis.cli import starting

_PRELOADED = (
    "lmcache_redis.cli.app",
    "lmcache_redis.agent.main",
    "lmcache_redis.admin.doctor",
    "lmcache_redis.admin.purge",
    "lmcache_redis.admin.report",
)
_context = get_context("forkserver")
_context.set_forkserver_preload([*_PRELOADED, "tests.frozen"])


class Forked:
    """What tests use of a ``subprocess.Popen`` whose output goes to ``log``.

    errors: where standard error goes; to ``log`` as well where None. environment: that of this
    process where None. program: a module whose ``main`` gets the words, and returns a status.
    constants: by their whole names, ``lmcache_redis.agent.service.HEARTBEAT_TIMEOUT_S``, values
    that it has instead.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: str = "",
        constants: Mapping[str, object] | None = None,
    ) -> None:
        environment = dict(os.environ if environment is None else environment)
        if starting.applies():
            # Else the process would replace itself by one that imports everything again. glibc
            # reads it when the server of the forks starts.
            environment.setdefault(starting.TUNABLES_VARIABLE, starting.THRESHOLD_SETTING)
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self._process = _context.Process(
                target=_run,
                args=([*words], environment, log, errors or log, program, dict(constants or {})),
                daemon=True,
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


def preload(program: str) -> None:
    """What it imports is imported before later forks. No fork may run now."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _context.set_forkserver_preload([*_PRELOADED, program, "tests.frozen"])


def start_server() -> None:
    """Starts what the first fork would start, and its two descriptors."""
    forkserver.ensure_running()


def run(
    words: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, and what it says."""
    with tempfile.TemporaryDirectory() as directory:
        said, errors = Path(directory, "said"), Path(directory, "errors")
        process = Forked(words, said, errors, environment)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess([*words], status, said.read_text(), errors.read_text())


def _run(
    words: list[str],
    environment: Mapping[str, str],
    log: Path,
    errors: Path,
    program: str,
    constants: Mapping[str, object],
) -> None:
    # Under nohup the tests ignore it, and so would the agent.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, log), (2, errors)):
        target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(target, number)
        os.close(target)
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        owner = importlib.import_module(module)
        assert hasattr(owner, name), path
        setattr(owner, name, value)
    if program:
        sys.exit(importlib.import_module(program).main(words))
    if "CUDA_STUB_CONTROL" in environment:
        # The loader read LD_LIBRARY_PATH when the server of the forks started.
        ctypes.CDLL(os.path.join(environment["LD_LIBRARY_PATH"], "libcuda.so.1"))
    sys.orig_argv = [sys.executable, "-m", "lmcache_redis.cli", *words]
    sys.argv = ["lmcache-redis", *words]
    from lmcache_redis.cli import main

    main()
