"""Judges mutants in a copy of the tree: by their nearest tests, in processes of their own."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.mutation import Mutant, lines_of, mutants_of

ROOT = Path(__file__).parent.parent.parent
# A file of tests that takes longer than this without a mutant judges none.
SLOWEST_TESTS_S = 60.0
# So does a single test.
SLOWEST_TEST_S = 8.0
# The time of the tests with a mutant, as a multiple of that without one, and what is added.
_TIMES, _MORE_S = 3.0, 10.0
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
_PASSED = 0


@dataclass
class Known:
    """Of a test, without a mutant. lines: those of the module that it runs in its own process."""

    seconds: float
    lines: frozenset[int]


@dataclass
class Verdicts:
    """Of the mutants of one module. tests: the files that judge, the nearest first, with the
    seconds that each takes without a mutant. unused: how many fail, take too long, or had no time
    to be tried."""

    module: str
    mutants: int = 0
    judged: int = 0
    tests: dict[str, float] = field(default_factory=dict)
    unused: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return self.judged - len(self.survivors)


def path_of(module: str) -> Path:
    """`chunks.keys` is lmcache_redis/chunks/keys.py, relative to the tree."""
    return Path("lmcache_redis", *module.split(".")).with_suffix(".py")


def nearest_tests(root: Path, module: str) -> list[str]:
    """The test files of the module's folder that mirror its name or import it, in this order.

    Where there is none of them: those that import a helper which does, else all of the folder. Of a
    folder within a folder, as cache/disk: all of it, too.
    Those that mention no servers come before others: they are faster.
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
    helpers = [path for path, text in texts.items() if imports.search(text)]
    through = [
        f"{'.'.join(path.relative_to(root).with_suffix('').parts)} import"
        for path in helpers
        if path.name[:5] != "test_"
    ]
    top = Path(root, "tests", folder.split(".")[0])
    near = [path for path in texts if path.name[:5] == "test_" and path.is_relative_to(top)]
    direct = [p for p in near if p.name == f"test_{name}.py" or imports.search(texts[p])]
    indirect = [p for p in near if any(each in texts[p] for each in through)]
    # In a folder of its own, as cache/disk, the tests of one module run the others.
    around = [p for p in near if p.is_relative_to(home) and (home != top or not direct + indirect)]
    chosen = [*dict.fromkeys(direct or indirect), *(p for p in around if p not in direct)]
    chosen.sort(key=lambda path: (path.name != f"test_{name}.py", "server" in texts[path]))
    return [str(path.relative_to(root)) for path in chosen]


class Tree:
    """A copy of the working tree, in which modules may be spoiled."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        self._notes = directory / "notes.json"
        self._base = directory / "tests"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
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
        # The libraries' plugins have been imported already.
        always += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        told = {"words": [*always, *words], "timeout_s": timeout_s, "caches": caches}
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        print(json.dumps(told), file=self._forking.stdin, flush=True)
        status: int | None = json.loads(self._forking.stdout.readline())
        return status

    def learn(self, module: Path, path: str) -> dict[str, Known] | None:
        """What the tests of a file do, by their names; None if one fails or it takes too long."""
        words = [path, "--lines-of", str(self.root / module), "--lines-to", str(self._notes)]
        if self.run(words, SLOWEST_TESTS_S, caches=True) != _PASSED:
            return None
        noted = json.loads(self._notes.read_text(encoding="utf-8"))
        return {name: Known(seconds, frozenset(lines)) for name, (seconds, lines) in noted.items()}

    def survives(self, tests: dict[str, Known]) -> bool:
        """Whether no test fails or takes much longer, now that a module is spoiled."""
        if not tests:
            return True
        self._notes.write_text(json.dumps([*tests]), encoding="utf-8")
        files: dict[str, float] = {}
        for name, known in tests.items():
            path = name.partition("::")[0]
            files[path] = files.get(path, 0.0) + known.seconds
        limit_s = _TIMES * sum(files.values()) + _MORE_S
        words = [*sorted(files, key=lambda path: files[path]), "--tests-from", str(self._notes)]
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
    near = nearest_tests(tree.root, module)
    known: dict[str, Known] = {}
    for file in near:
        # At most a third of the time for learning which tests can judge.
        if known and time.monotonic() > began_s + 20 * minutes:
            break
        if (learned := tree.learn(path_of(module), file)) is not None:
            verdicts.tests[file] = sum(each.seconds for each in learned.values())
            known |= {n: each for n, each in learned.items() if each.seconds <= SLOWEST_TEST_S}
    verdicts.unused = len(near) - len(verdicts.tests)
    try:
        for mutant in mutants if known else ():
            if time.monotonic() >= until_s:
                break
            path.write_text(mutant.applied(source), encoding="utf-8")
            # Bytecode of the source is kept, and is told apart by size and second.
            os.utime(path, (0, verdicts.judged))
            verdicts.judged += 1
            lines = lines_of(source, mutant)
            # What no test runs in its own process may run in one that it starts.
            tests = {
                n: each for n, each in known.items() if not each.lines.isdisjoint(lines)
            } or known
            if tree.survives(tests):
                verdicts.survivors.append(mutant)
                where = f"{path_of(module)}:{mutant.line}"
                say(f"survived: {where} ({mutant.kind})\n{mutant.diff(source)}")
    finally:
        path.write_text(source, encoding="utf-8")
    return verdicts
