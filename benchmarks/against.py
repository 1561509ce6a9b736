# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench against`: this checkout beside another commit, in turns: what became slower?

One slow round is the machine, so only a figure that is slower in each round counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ratios, rotated
from lmcache_redis.errors import ConfigError, LMCacheRedisError

ROOT = Path(__file__).parent.parent
# Of the other commit's speed.
SLOWER = 0.8
_PLANE = ("data-plane", "--no-peers", "--no-scans", "--rounds", "3", "--threads", "1")
_LOOKUP = ("lookup", "--rounds", "200")
_MAIN_JOB = ("main-job", "--rounds", "3")
# Of the main job: the rest is vLLM's or the data plane's.
_OURS = ("cold", "pool-hit", "redis-hit")
_WAIT_S = 900

# A speed by what was measured: more is better.
Figures = Mapping[str, float]


class CannotCompare(LMCacheRedisError):
    """The other commit cannot be found, built or measured."""


def default_base(root: Path) -> str:
    """The last release; before the first, the last commit that is a week old, else the first."""
    try:
        return _git(root, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^")
    except CannotCompare:
        old = _git(root, "rev-list", "-1", "--before=7 days ago", "HEAD")
        return old or _git(root, "rev-list", "--max-parents=0", "HEAD").splitlines()[0]


def unpacked(root: Path, commit: str, directory: Path) -> Path:
    """The tree of a commit with its native extension."""
    packed = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True)
    if packed.returncode:
        raise CannotCompare(packed.stderr.decode().strip())
    subprocess.run(["tar", "--extract"], cwd=directory, input=packed.stdout, check=True)
    _run(directory, "setup.py", "--quiet", "build_ext", "--inplace")
    return directory


def measure(tree: Path) -> dict[str, float]:
    """The figures of a tree, by its own benchmark."""
    where = _run(tree, "-c", "import lmcache_redis; print(lmcache_redis.__file__)").strip()
    if not Path(where).is_relative_to(tree):
        raise CannotCompare(f"{tree} was not measured, but {where}")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, "rows.json")
        for words, output in (
            (_PLANE, ("--plot", Path(scratch, "plot.png"))),
            (_LOOKUP, ()),
            (_MAIN_JOB, ("--output-dir", scratch)),
        ):
            _run(tree, "-m", "benchmarks", *words, "--json", written, *output)
            found |= figures(json.loads(written.read_text())["rows"])
    return found


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """GB/s of a data plane; lookups a second; first tokens a second of the main job."""
    found = {}
    for row in rows:
        if row.get("gb_per_s"):
            found[f"{row['op']}, {row['value_bytes'] / (1 << 20):g} MiB"] = row["gb_per_s"]
        elif str(row.get("case")).startswith("lookup"):
            found[row["case"]] = 1e3 / row["ms"]
        elif row.get("case") in _OURS:
            found[f"main job, {row['case']}"] = 1 / row["median_s"]
    return found


def compare(
    trees: Sequence[Path], rounds: int, measure: Callable[[Path], Figures] = measure
) -> list[dict[str, Any]]:
    """A row for each figure of both trees, the other commit's first. slower: in every round."""
    taken: dict[Path, list[Figures]] = {tree: [] for tree in trees}
    for number in range(rounds):
        for tree in rotated(trees, number):
            taken[tree].append(measure(tree))
    other, this = taken.values()
    rows = []
    for name in this[0]:
        if all(name in each for each in (*other, *this)):
            found = ratios([each[name] for each in this], [each[name] for each in other])
            slower = all(ratio < SLOWER for ratio in found)
            rows.append({"figure": name, "ratios": [round(r, 2) for r in found], "slower": slower})
    if not rows:
        raise CannotCompare("the two commits have no figure in common")
    return rows


def run(base: str | None, rounds: int) -> tuple[str, list[dict[str, Any]]]:
    """The other commit, and the rows."""
    if not (ROOT / ".git").exists():
        raise ConfigError("needs a clone of the repository, with its history")
    commit = base or default_base(ROOT)
    with tempfile.TemporaryDirectory(prefix="lmcache-redis-against-") as directory:
        return commit, compare([unpacked(ROOT, commit, Path(directory)), ROOT], rounds)


def _git(root: Path, *words: str) -> str:
    return _done(["git", *words], root, dict(os.environ))


def _run(tree: Path, *words: object) -> str:
    """This Python, with the package of a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return _done([sys.executable, *map(str, words)], tree, environment)


def _done(words: list[str], directory: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=_WAIT_S
    )
    if done.returncode:
        raise CannotCompare(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
