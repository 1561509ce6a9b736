# SPDX-License-Identifier: Apache-2.0
"""`player` as a process of a test."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

from tests import cuda_driver
from tests.forks import Forked
from tests.harness import WAIT_S, wait_until

PROGRAM = "tests.cuda_driver.player"


class PlayerProcess:
    """A context manager: on exit the player has ended, and has seen no wrong byte unless killed."""

    def __init__(self, endpoint: str, seed: int, directory: Path, **options: object) -> None:
        self._name = f"player-{seed}"
        self._out, self._errors = (directory / f"{self._name}.{end}" for end in ("out", "err"))
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        # With a table of its own: it is no agent, whose GPU is to hang or to be lost.
        own = cuda_driver.environment(devices=2, seed=seed)
        for each in (self._out, self._errors):
            each.touch()
        words = [endpoint, str(seed), *words]
        self._process = Forked(words, self._out, self._errors, {**os.environ, **own}, PROGRAM)
        self.pid = self._process.pid

    @property
    def counts(self) -> Counter[str]:
        """What it has done so far."""
        lines = self._out.read_text().rpartition("\n")[0].splitlines()
        return Counter(json.loads(lines[-1])) if lines else Counter()

    def wait_for(self, name: str, more: int = 1) -> None:
        """Until it has done something, so often again."""
        least = self.counts[name] + more
        wait_until(
            lambda: self.check() or self.counts[name] >= least, f"{least} {name}", timeout_s=WAIT_S
        )

    def check(self) -> None:
        """It plays."""
        status = self._process.poll()
        assert status is None, f"{self._name} ended with {status}:\n{self.errors}"

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self) -> Counter[str]:
        """Ends it, when its requests are over; what it has done."""
        wait_until(lambda: self.check() or self.counts, "a player", timeout_s=WAIT_S)
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(WAIT_S)
        assert status == 0, f"{self._name} ended with {status}:\n{self.errors}"
        return self.counts

    def __enter__(self) -> PlayerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._process.returncode is None:
            self.finish()
        else:
            self.kill()
