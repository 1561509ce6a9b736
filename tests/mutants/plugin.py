"""A plugin of pytest: what a run in a copy of the tree is told, and what it tells.

Hypothesis says that a test fails, and looks for no smaller example. A run without a mutant notes
which lines of the module each test has run, and how long it took; one with a mutant runs the tests
that are named. Lines that run in other processes are not noted.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-of", help="the file whose lines are noted")
    parser.addoption("--lines-to", help="where they are written, as JSON: test, seconds and lines")
    parser.addoption("--tests-from", help="a JSON list of the tests to run")


def pytest_collection() -> None:
    quick = settings(settings.default, phases=(Phase.explicit, Phase.generate), database=None)
    settings.register_profile("mutants", quick)
    settings.load_profile("mutants")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.lines_of:
        config.pluginmanager.register(_Lines(config.option.lines_of, config.option.lines_to))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tests_from:
        names = set(json.loads(Path(config.option.tests_from).read_text(encoding="utf-8")))
        items[:] = [item for item in items if item.nodeid in names]


class _Lines:
    def __init__(self, of: str, to: str) -> None:
        self._of = of
        self._to = Path(to)
        self._lines: set[int] = set()
        self._noted: dict[str, tuple[float, list[int]]] = {}
        self._seconds = 0.0

    def _call(self, frame: FrameType, event: str, value: object) -> object:
        if frame.f_code.co_filename != self._of:
            return None
        self._lines.add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, value: object) -> object:
        self._lines.add(frame.f_lineno)
        return self._line

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        # Threads that a fixture of a module has started go on noting, into the set of this test.
        self._lines.clear()
        self._seconds = 0.0
        threading.settrace(self._call)  # type: ignore[arg-type]
        sys.settrace(self._call)  # type: ignore[arg-type]
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self._noted[item.nodeid] = self._seconds, sorted(self._lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration

    def pytest_sessionfinish(self) -> None:
        self._to.write_text(json.dumps(self._noted), encoding="utf-8")
