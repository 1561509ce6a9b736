# SPDX-License-Identifier: Apache-2.0
"""Notes which lines of some files run, in the process of the tests and in those that it starts.

A file takes the notes: each process adds a line of text for a line that it runs, once a test. The
other processes start noting as Python starts: `sitecustomize` of the copied tree calls `start`.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_TOLD = "MUTANTS_LINES"


class Lines:
    """files: whose lines are noted. directory: has the notes, and the number of the test."""

    def __init__(self, files: Sequence[str], directory: str) -> None:
        self._files = {file: number for number, file in enumerate(files)}
        self._notes = os.open(Path(directory, "lines"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with Path(directory, "test").open("rb") as file:
            self._test = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._noted: set[tuple[str, int]] = set()
        self._noted_in = 0

    def start(self) -> None:
        threading.settrace(self._call)  # type: ignore[arg-type]
        sys.settrace(self._call)  # type: ignore[arg-type]

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _call(self, frame: FrameType, event: str, value: object) -> object:
        return self._line(frame, event, value) if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, value: object) -> object:
        if self._noted_in != self._test[0]:
            self._noted.clear()
            self._noted_in = self._test[0]
        file, line = frame.f_code.co_filename, frame.f_lineno
        if (file, line) not in self._noted:
            self._noted.add((file, line))
            os.write(self._notes, b"%d %d\n" % (self._files[file], line))
        return self._line


class Notes:
    """Has lines noted, test by test. directory: an empty one."""

    def __init__(self, files: Sequence[str], directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._tests = 0
        self._begin()
        os.environ[_TOLD] = os.pathsep.join((str(directory), *files))
        self.lines = Lines(files, str(directory))
        self._reader = (directory / "lines").open("rb")

    def _begin(self) -> None:
        # In place: other processes have mapped it.
        with (self._directory / "test").open("r+b" if self._tests else "wb") as file:
            file.write(bytes((self._tests % 256,)))
        self._tests += 1

    def taken(self) -> dict[str, list[int]]:
        """The lines noted since the last call, by file."""
        found: dict[str, set[int]] = {}
        for text in self._reader.readlines():
            number, line = map(int, text.split())
            found.setdefault(self._files[number], set()).add(line)
        self._begin()
        return {file: sorted(lines) for file, lines in found.items()}


def start() -> None:
    """In a process that a test has started: notes lines if it is told to."""
    if _TOLD in os.environ:
        directory, *files = os.environ[_TOLD].split(os.pathsep)
        Lines(files, directory).start()
