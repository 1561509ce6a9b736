# SPDX-License-Identifier: Apache-2.0
"""Runs pytest in forks of a process that has imported the libraries: each is a second sooner there.

Lines of JSON come in, each a run, and lines of JSON with its exit status go out: null if it took
too long. Nothing of the package or of its tests is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time

import pytest

_LIBRARIES = (
    "asyncio", "ssl", "multiprocessing.forkserver", "numpy", "hypothesis.strategies", "msgspec",
    "zmq", "redis", "hiredis", "xxhash", "prometheus_client", "fakeredis", "typer", "rich.table",
    "cryptography.hazmat.primitives.ciphers.aead", "_pytest.python", "pytest_timeout",
)  # fmt: skip
_LOOK_S = 0.005


def run(words: list[str], timeout_s: float, caches: bool) -> int | None:
    child = os.fork()
    if not child:
        # Of its own session: what the tests start ends with it.
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        # No bytecode of mutants: two of one size may be written within a second.
        sys.dont_write_bytecode = not caches
        os.environ.update({} if caches else {"PYTHONDONTWRITEBYTECODE": "1"})
        status = 99
        try:
            status = int(pytest.main(words))
        finally:
            os._exit(status)
    until_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < until_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(_LOOK_S)
        return None
    finally:
        # With the servers that the tests have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child or ended, signal.SIGKILL)
        if child:
            os.waitpid(child, 0)


def main() -> None:
    for library in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
