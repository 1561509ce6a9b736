# SPDX-License-Identifier: Apache-2.0
"""Judges mutants in a copy of the tree: by their nearest tests, in processes of their own."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.mutation import Mutant, lines_of, mutants_of

ROOT = Path(__file__).parent.parent.parent
# For learning what tests do without a mutant: those that did not run by then judge none.
SLOWEST_TESTS_S = 60.0
# So does a single test.
SLOWEST_TEST_S = 8.0
# The tests that judge one mutant take about this long together.
JUDGING_S = 15.0
# The time of the tests with a mutant, as a multiple of that without one, and what is added.
_TIMES, _MORE_S = 3.0, 10.0
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
_STARTS_NOTING = "from tests.mutants import tracing\n\ntracing.start()\n"
_PASSED = 0


@dataclass
class Known:
    """Of a test, without a mutant. lines: those of the module that it runs, in any process."""

    seconds: float
    lines: frozenset[int]


@dataclass
class Verdicts:
    """Of the mutants of one module. tests: the files that judge, the nearest first, with the
    seconds that they take without a mutant. untried: files that there was no time to learn."""

    module: str
    mutants: int = 0
    judged: int = 0
    tests: dict[str, float] = field(default_factory=dict)
    untried: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return self.judged - len(self.survivors)


def path_of(module: str) -> Path:
    """`chunks.keys` is lmcache_redis/chunks/keys.py, relative to the tree."""
    return Path("lmcache_redis", *module.split(".")).with_suffix(".py")


def nearest_tests(root: Path, module: str) -> list[str]:
    """The test files that may run a module, the nearest first.

    The one that mirrors its name; those of its folder that import it; those that do through a
    helper; the others of the folder; those elsewhere that import it. But those that mention no
    servers come before others: they are faster.
    """
    folder, _, name = module.rpartition(".")
    home = Path(root, "tests", *folder.split("."))
    while not home.is_dir():
        home = home.parent
    texts = {
        path: path.read_text(encoding="utf-8") for path in sorted(Path(root, "tests").rglob("*.py"))
    }
    of_folder = rf"from lmcache_redis\.{re.escape(folder)} import [^\n]*\b{name}\b"
    imports = re.compile(rf"lmcache_redis\.{re.escape(module)} import|{of_folder}")
    importing = [path for path, text in texts.items() if imports.search(text)]
    through = [
        f"{'.'.join(path.relative_to(root).with_suffix('').parts)} import"
        for path in importing
        if path.name[:5] != "test_"
    ]
    top = Path(root, "tests", folder.split(".")[0])

    def distance(path: Path) -> int:
        if not path.is_relative_to(top):
            return 5 if path in importing else 6
        if path.name == f"test_{name}.py":
            return 0
        if path in importing:
            return 1
        if any(each in texts[path] for each in through):
            return 2
        return 3 if path.is_relative_to(home) else 4

    near = {p: distance(p) for p in texts if p.name[:5] == "test_" and distance(p) < 6}
    ordered = sorted(near, key=lambda p: (near[p] > 0, "server" in texts[p], near[p]))
    return [str(path.relative_to(root)) for path in ordered]


def batches(root: Path, files: Iterable[str]) -> list[list[str]]:
    """Files that are run together: those that mention no servers, and each other one alone."""
    found: list[list[str]] = []
    for slow, several in itertools.groupby(files, lambda f: "server" in (root / f).read_text()):
        group = [*several]
        found += [[each] for each in group] if slow else [group]
    return found


def that_judge(known: dict[str, Known], lines: Collection[int]) -> dict[str, Known]:
    """Of the tests that run one of the lines: the fastest, for some seconds together."""
    running = [(n, each) for n, each in known.items() if not each.lines.isdisjoint(lines)]
    chosen: dict[str, Known] = {}
    left_s = JUDGING_S
    for test, each in sorted(running, key=lambda pair: pair[1].seconds):
        left_s -= each.seconds
        if left_s < 0 and chosen:
            break
        chosen[test] = each
    return chosen


class Tree:
    """A copy of the working tree, in which modules may be spoiled.

    modules: of these it is learned at once which tests run them.
    """

    def __init__(self, directory: Path, modules: Iterable[str]) -> None:
        self.root = directory / "tree"
        self._notes = directory / "notes.json"
        self._base = directory / "tests"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
        (self.root / "sitecustomize.py").write_text(_STARTS_NOTING, encoding="utf-8")
        self._modules = [str(self.root / path_of(module)) for module in modules]
        # The seconds of each test, and the lines of each module that it runs; by file of tests.
        self._learned: dict[str, dict[str, tuple[float, dict[str, list[int]]]]] = {}
        self._forking = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forking"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self._forking.communicate()

    def run(self, words: Iterable[str], timeout_s: float, caches: bool = False) -> int | None:
        """The exit status of pytest; None if it took too long."""
        always = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
        always += ["-m", "unit or servers", "--basetemp", str(self._base)]
        # Whatever configuration lies in a folder above.
        always += ["--rootdir", str(self.root), "-c", str(self.root / "pyproject.toml")]
        # The libraries' plugins have been imported already.
        always += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        told = {"words": [*always, *words], "timeout_s": timeout_s, "caches": caches}
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        print(json.dumps(told), file=self._forking.stdin, flush=True)
        status: int | None = json.loads(self._forking.stdout.readline())
        return status

    def learn(self, files: Sequence[str]) -> bool:
        """Has the tests of some files run, unless they have, to know what they do.

        False if their time was over before all had run: the next call goes on with the next file.
        """
        unknown = [path for path in files if path not in self._learned]
        if not unknown:
            return True
        lines_of = [word for each in self._modules for word in ("--lines-of", each)]
        self._notes.write_text("", encoding="utf-8")  # also if nothing runs in time
        words = [*unknown, *lines_of, "--lines-to", str(self._notes), "--maxfail=0"]
        ended = self.run(words, SLOWEST_TESTS_S, caches=True) is not None
        lines = self._notes.read_text(encoding="utf-8").splitlines(keepends=True)
        noted = [json.loads(line) for line in lines if line.endswith("\n")]
        if not ended:
            last = noted[-1][0].partition("::")[0] if noted else unknown[0]
            unknown = unknown[: unknown.index(last) + 1]
        self._learned |= {path: {} for path in unknown}
        for name, seconds, run in noted:
            self._learned[name.partition("::")[0]][name] = seconds, run
        return ended

    def known(self, path: str, module: str) -> dict[str, Known] | None:
        """What those tests of a file do that pass, and run the module; None if not learned."""
        if path not in self._learned:
            return None
        file = str(self.root / path_of(module))
        return {
            name: Known(seconds, frozenset(lines[file]))
            for name, (seconds, lines) in self._learned[path].items()
            if file in lines
        }

    def survives(self, tests: dict[str, Known]) -> bool:
        """Whether no test fails or takes much longer, now that a module is spoiled.

        True if there is no test.
        """
        if not tests:
            return True
        self._notes.write_text(json.dumps([*tests]), encoding="utf-8")
        files: dict[str, float] = {}
        for name, known in tests.items():
            path = name.partition("::")[0]
            files[path] = files.get(path, 0.0) + known.seconds
        limit_s = _TIMES * sum(files.values()) + _MORE_S
        # What hangs is ended sooner.
        slowest_s = max(known.seconds for known in tests.values())
        words = [*sorted(files, key=lambda path: files[path]), "--tests-from", str(self._notes)]
        words += ["--timeout", str(_TIMES * slowest_s + _MORE_S / 2)]
        return self.run(words, limit_s) == _PASSED


def judge(
    tree: Tree, module: str, minutes: float, seed: int, say: Callable[[str], None]
) -> Verdicts:
    """Judges mutants in an order that the seed decides, until their time is over."""
    began_s = time.monotonic()
    until_s = began_s + 60 * minutes
    path = tree.root / path_of(module)
    source = path.read_text(encoding="utf-8")
    mutants = mutants_of(source)
    random.Random(f"{seed} {module}").shuffle(mutants)
    verdicts = Verdicts(module, len(mutants))
    known: dict[str, Known] = {}
    near = nearest_tests(tree.root, module)
    for files in batches(tree.root, near):
        learned = False
        # At most a third of the time for learning which tests can judge.
        while not learned and (not known or time.monotonic() < began_s + 20 * minutes):
            learned = tree.learn(files)
            for file in files:
                if running := tree.known(file, module):
                    verdicts.tests[file] = sum(each.seconds for each in running.values())
                    known |= {n: e for n, e in running.items() if e.seconds <= SLOWEST_TEST_S}
    verdicts.untried = sum(tree.known(file, module) is None for file in near)
    try:
        for mutant in mutants if known else ():
            if time.monotonic() >= until_s:
                break
            path.write_text(mutant.applied(source), encoding="utf-8")
            # Bytecode of the source is kept, and is told apart by size and second.
            os.utime(path, (0, verdicts.judged))
            verdicts.judged += 1
            if tree.survives(that_judge(known, lines_of(source, mutant))):
                verdicts.survivors.append(mutant)
                where = f"{path_of(module)}:{mutant.line}"
                say(f"survived: {where} ({mutant.kind})\n{mutant.diff(source)}")
    finally:
        path.write_text(source, encoding="utf-8")
    return verdicts
