"""Judges mutants in a copy of the tree: by their nearest tests, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.mutation import Mutant, mutants_of

ROOT = Path(__file__).parent.parent.parent
# A file of tests that takes longer than this without a mutant judges none.
SLOWEST_TESTS_S = 20.0
# The time of a file with a mutant, as a multiple of that without one, and what is added.
_TIMES, _MORE_S = 3.0, 10.0
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist")
_PASSED = 0


@dataclass
class Verdicts:
    """Of the mutants of one module. tests: those that judge, the nearest first, with the seconds
    that each takes without a mutant. unused: how many fail, take too long, or had no time to be
    tried."""

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

    Those that mention no servers come before others: they are faster.
    """
    *folders, name = module.split(".")
    mirrors, importers, slow = [], [], []
    for path in sorted(Path(root, "tests", *folders[:1]).rglob("test_*.py")):
        if path.name == f"test_{name}.py":
            mirrors.append(path)
        elif f"lmcache_redis.{module} import" in path.read_text(encoding="utf-8"):
            (slow if "server" in path.read_text(encoding="utf-8") else importers).append(path)
    return [str(path.relative_to(root)) for path in (*mirrors, *importers, *slow)]


class Tree:
    """A copy of the working tree, in which modules may be spoiled."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        self._base = directory / "tests"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)

    def run(self, path: str, timeout_s: float, caches: bool = False) -> int | None:
        """The exit status of pytest; None if it took too long."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        words += ["-p", "tests.mutants.no_shrinking", "-m", "unit or servers"]
        words += ["--basetemp", str(self._base), path]
        # No bytecode of mutants: two of one size may be written within a second.
        without = {} if caches else {"PYTHONDONTWRITEBYTECODE": "1"}
        environment = {**os.environ, "PYTHONPATH": str(self.root), **without}
        with subprocess.Popen(
            words,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # With the servers that the tests have started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def usable(self, tests: list[str], until_s: float) -> dict[str, float]:
        """The tests that pass as they are, and soon enough, with the seconds that they take."""
        usable: dict[str, float] = {}
        for path in tests:
            began_s = time.monotonic()
            if usable and began_s > until_s:
                break
            if self.run(path, SLOWEST_TESTS_S, caches=True) == _PASSED:
                usable[path] = time.monotonic() - began_s
        return usable

    def survives(self, tests: dict[str, float]) -> bool:
        """Whether no test fails or takes much longer, now that a module is spoiled."""
        limits = {path: _TIMES * seconds + _MORE_S for path, seconds in tests.items()}
        return all(self.run(path, limit_s) == _PASSED for path, limit_s in limits.items())


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
    # At most a third of the time for learning which tests can judge.
    near = nearest_tests(tree.root, module)
    verdicts.tests = tree.usable(near, began_s + 20 * minutes)
    verdicts.unused = len(near) - len(verdicts.tests)
    try:
        for mutant in mutants if verdicts.tests else ():
            if time.monotonic() >= until_s:
                break
            path.write_text(mutant.applied(source), encoding="utf-8")
            # Bytecode of the source is kept, and is told apart by size and second.
            os.utime(path, (0, verdicts.judged))
            verdicts.judged += 1
            if tree.survives(verdicts.tests):
                verdicts.survivors.append(mutant)
                where = f"{path_of(module)}:{mutant.line}"
                say(f"survived: {where} ({mutant.kind})\n{mutant.diff(source)}")
    finally:
        path.write_text(source, encoding="utf-8")
    return verdicts
