# SPDX-License-Identifier: Apache-2.0
"""A process with the driver of the tests, which evaluates what a test asks for."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import cuda_driver

ROOT = Path(__file__).parent.parent.parent


class PeerError(Exception):
    """What the process raised, as text."""


class Peer:
    """A process that has made the context of its first GPU.

    variables: set beside those of `environment`, which `cuda_driver.environment` makes.
    """

    def __init__(
        self, environment: dict[str, str] | None = None, *, context: bool = True, **variables: str
    ) -> None:
        self.environment = cuda_driver.environment() if environment is None else environment
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.cuda_driver.peers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment, **variables},
        )
        self.pid = self._process.pid
        if context:
            self("driver.set_context(driver.retain_context(0))")

    def __call__(self, expression: str) -> object:
        """What Python evaluates it to there: a literal. Raises PeerError."""
        self.begin(expression)
        return self.end()

    def begin(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def end(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        raised, _, text = line.strip().partition(" ")
        if raised == "raised":
            raise PeerError(ast.literal_eval(text))
        return ast.literal_eval(text)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """What the process runs."""
    from benchmarks.gpu.contact.exporter import map_pieces
    from lmcache_redis.device import driver
    from tests.cuda_driver.buffers import bytes_at

    here = {"driver": driver, "bytes_at": bytes_at, "map_pieces": map_pieces}
    for line in sys.stdin:
        try:
            answer = f"returned {eval(line, here)!r}"
        except Exception as error:
            answer = f"raised {str(error)!r}"
        print(answer, flush=True)
