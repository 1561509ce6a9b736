# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: what a run in a copy of the tree is told, and what it tells.

Hypothesis says that a test fails, and looks for no smaller example. A run without a mutant notes
which lines of the modules each test that passed has run, and how long it took, test by test: what
is ended early has said something. One with a mutant runs the tests that are named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.mutants.tracing import Notes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-of", action="append", help="a file whose lines are noted")
    parser.addoption("--lines-to", help="the file for lines of JSON: test, seconds, lines")
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
    def __init__(self, of: Sequence[str], to: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lines-", dir=Path(to).parent)
        self._notes = Notes(of, Path(self._directory.name))
        self._to = Path(to)
        self._seconds = 0.0
        self._passed = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        # What a fixture of a module has started goes on noting, for this test.
        self._seconds, self._passed = 0.0, True
        self._notes.lines.start()
        try:
            return (yield)
        finally:
            self._notes.lines.stop()
            lines = self._notes.taken()
            if self._passed:
                with self._to.open("a", encoding="utf-8") as file:
                    print(json.dumps([item.nodeid, self._seconds, lines]), file=file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        self._passed = self._passed and report.outcome != "failed"
