# SPDX-License-Identifier: Apache-2.0
"""This commit beside another one, in turns, in repositories with a benchmark of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.against import CannotCompare, compare, default_base, unpacked

SETUP = "from pathlib import Path; Path('built').touch()\n"
BENCHMARK = """\
import json, sys
from pathlib import Path
rows = json.loads(Path("rows.json").read_text())[sys.argv[1]]
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
"""


def git(root: Path, *words: str, date: datetime | None = None) -> str:
    named = ["-c", "user.name=n", "-c", "user.email=n@localhost", "-c", "tag.gpgSign=false"]
    dates = {"GIT_AUTHOR_DATE": str(date), "GIT_COMMITTER_DATE": str(date)} if date else {}
    done = subprocess.run(
        ["git", *named, *words], cwd=root, env=os.environ | dates,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def commit(root: Path, gb_per_s: float, days_old: int = 0) -> str:
    """A commit whose benchmark tells that speed."""
    plane = [{"op": "load", "value_bytes": 2 << 20, "gb_per_s": gb_per_s, "ms": None}]
    job = [{"case": case, "median_s": 0.5} for case in ("plain", "cold", "get")]
    rows = {"data-plane": plane, "lookup": [{"case": "lookup-pool", "ms": 0.5}], "main-job": job}
    for name, text in (
        ("setup.py", SETUP),
        ("lmcache_redis/__init__.py", ""),
        ("benchmarks/__main__.py", BENCHMARK),
        ("rows.json", json.dumps(rows)),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    date = datetime.now().astimezone() - timedelta(days=days_old)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "c", date=date)
    return git(root, "rev-parse", "HEAD")


@pytest.mark.servers
def test_the_other_commit_is_the_last_release_else_a_week_old(tmp_path: Path) -> None:
    commit(tmp_path, 3.0, days_old=3)
    first = git(tmp_path, "rev-parse", "HEAD")
    assert default_base(tmp_path) == first, "no commit is a week old"
    old = tmp_path / "old"
    commit(old, 1.0, days_old=20)
    week = commit(old, 2.0, days_old=8)
    commit(old, 3.0, days_old=2)
    assert default_base(old) == week
    git(old, "tag", "v0.1.0", "HEAD~2")
    git(old, "tag", "other", "HEAD~1")
    assert default_base(old) == "v0.1.0"
    git(old, "tag", "v0.2.0")
    assert default_base(old) == "v0.1.0", "a release is compared with the one before"


@pytest.mark.servers
def test_two_commits_are_measured(tmp_path: Path) -> None:
    root = tmp_path / "root"
    commit(root, 3.0)
    commit(root, 2.0)
    (tmp_path / "base").mkdir()
    base = unpacked(root, "HEAD~1", tmp_path / "base")
    assert (base / "built").exists()
    load, lookup, cold = compare([base, root], 3)
    assert load == {"figure": "load, 2 MiB", "ratios": [0.67] * 3, "slower": True}
    assert lookup == {"figure": "lookup-pool", "ratios": [1.0] * 3, "slower": False}
    assert cold == {"figure": "main job, cold", "ratios": [1.0] * 3, "slower": False}
    with pytest.raises(CannotCompare, match="nowhere"):
        unpacked(root, "nowhere", tmp_path / "base")


def test_only_what_is_slower_in_each_round_counts() -> None:
    speeds = {
        "other": [{"a": 10.0, "b": 10.0, "gone": 1.0}] * 3,
        "this": [{"a": 7.9, "b": 1.0}, {"a": 5.0, "b": 1.0}, {"a": 7.0, "b": 8.1}],
    }
    order: list[str] = []

    def measure(tree: Path) -> dict[str, float]:
        order.append(tree.name)
        return speeds[tree.name][order.count(tree.name) - 1]

    a, b = compare([Path("other"), Path("this")], 3, measure)
    assert (a["slower"], a["ratios"]) == (True, [0.79, 0.5, 0.7])
    assert (b["slower"], b["ratios"]) == (False, [0.1, 0.1, 0.81])
    assert order == ["other", "this", "this", "other", "other", "this"], "in turns"
    with pytest.raises(CannotCompare, match="no figure in common"):
        compare([Path("other"), Path("this")], 1, lambda tree: {tree.name: 1.0})
