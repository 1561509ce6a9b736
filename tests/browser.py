# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: Chromium, where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60.0
_ENGINE_SETTINGS = {"light": "preferredColorScheme=1", "dark": "preferredColorScheme=0"}


@dataclass(frozen=True)
class Browser:
    """Each call is a process of its own, with a profile in ``directory``."""

    program: str
    directory: Path

    @staticmethod
    def find(directory: Path) -> Browser:
        """Skips the test where there is none."""
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            pytest.skip("no Chromium: run `apt-get install chromium-headless-shell`")
        return Browser(found, directory)

    def dom(self, url: str, size: tuple[int, int] = (1180, 1400)) -> str:
        """The document as the browser has it, after its scripts."""
        return self._run("--dump-dom", f"--window-size={size[0]},{size[1]}", url)

    @contextmanager
    def open(self, url: str) -> Iterator[None]:
        """A browser that shows the page until the context ends."""
        process = subprocess.Popen(
            self._command("--remote-debugging-port=0", url),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            # Debian's program is a script that starts the browser.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_TIMEOUT_S)

    def screenshot(
        self, url: str, path: Path, scheme: str = "light", size: tuple[int, int] = (1180, 1400)
    ) -> None:
        """A PNG. scheme: light or dark, as the user prefers."""
        self._run(
            f"--screenshot={path}", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}",
            f"--blink-settings={_ENGINE_SETTINGS[scheme]}", url,
        )  # fmt: skip

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            self._command(*words), capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return done.stdout

    def _command(self, *words: str) -> list[str]:
        # Tests run as root in containers, where Chromium's own sandbox cannot be made.
        return [
            self.program, "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", f"--user-data-dir={self.directory}", *words,
        ]  # fmt: skip
