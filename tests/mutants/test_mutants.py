# SPDX-License-Identifier: Apache-2.0
"""That the mutants are those which `scripts/mutate` promises, and that it tells killed from not."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants import runner
from tests.mutants.mutation import lines_of, mutants_of
from tests.mutants.runner import Known, Tree, batches, judge, nearest_tests, that_judge

SOURCE = '''\
"""A docstring < that says 1."""
from __future__ import annotations

LIMIT = 1


def make_key(prefix: bytes, rest: bytes) -> bytes:
    """Nothing == to change."""
    return prefix + rest


def work(self, items: list[int], limit: int = 3) -> bool:
    logger.warning("é", 1 + 1)
    for item in items:
        if item < limit and item not in self.known:
            self.known.add(item)
        self.count += item - 2
    try:
        self.run()
    finally:
        self.socket.close()
    if not items:
        raise ValueError("no" + "ne")
    return True


def __repr__(self) -> str:
    return 1 < 2
'''
# The kind, the line that it changes, and what becomes of it.
EXPECTED = [
    ("bound", "def work(self, items: list[int], limit: int = 3) -> bool:", "limit: int = 4"),
    ("field", "return prefix + rest", "return (prefix)"),
    ("field", "return prefix + rest", "return (rest)"),
    ("comparison", "if item < limit and item not in self.known:", "item <= limit and"),
    ("comparison", "if item < limit and item not in self.known:", "item in self.known"),
    ("logic", "if item < limit and item not in self.known:", ") or ("),
    ("condition", "if item < limit and item not in self.known:", "(not ("),
    ("statement", "self.known.add(item)", "pass"),
    ("statement", "self.count += item - 2", "pass"),
    ("bound", "self.count += item - 2", "(item) + (2)"),
    ("bound", "self.count += item - 2", "item - 3"),
    ("statement", "self.run()", "pass"),
    ("clean-up", "self.socket.close()", "pass"),
    ("condition", "if not items:", "(not (not items))"),
    ("statement", 'raise ValueError("no" + "ne")', "pass"),
    ("answer", "return True", "return False"),
]


def test_the_mutants_are_these() -> None:
    found = mutants_of(SOURCE)
    lines = SOURCE.splitlines()
    expected = [(kind, line) for kind, line, _ in EXPECTED]
    assert sorted((m.kind, lines[m.line - 1].strip()) for m in found) == sorted(expected)
    for kind, line, becomes in EXPECTED:
        made = [m for m in found if m.kind == kind and lines[m.line - 1].strip() == line]
        assert any(becomes in mutant.diff(SOURCE) for mutant in made), (kind, line, made)


def test_each_mutant_is_one_change_that_compiles() -> None:
    source = Path(runner.ROOT, "lmcache_redis", "chunks", "metadata.py").read_text()
    found = mutants_of(source)
    assert found == mutants_of(source), "in one order"
    before = ast.dump(ast.parse(source))
    for mutant in found:
        assert ast.dump(ast.parse(mutant.applied(source))) != before, mutant
        minus, *_, plus = mutant.diff(source).splitlines()
        assert (minus[0], plus[0]) == ("-", "+")


def test_the_nearest_tests(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "chunks"
    folder.mkdir(parents=True)
    (folder / "test_keys.py").write_text("")
    (folder / "test_all.py").write_text("from lmcache_redis.chunks.keys import ObjectKey\n")
    (folder / "test_none.py").write_text("from lmcache_redis.chunks.frame import Frame\n")
    (folder / "made.py").write_text("from lmcache_redis.chunks import names\n")
    (folder / "test_made.py").write_text("from tests.chunks.made import name  # needs a server\n")
    (tmp_path / "tests" / "test_far.py").write_text("")
    (tmp_path / "tests" / "test_user.py").write_text("from lmcache_redis.chunks import keys\n")
    assert nearest_tests(tmp_path, "chunks.keys") == [
        "tests/chunks/test_keys.py",
        "tests/chunks/test_all.py",
        "tests/chunks/test_none.py",
        "tests/test_user.py",
        "tests/chunks/test_made.py",
    ]
    near = nearest_tests(tmp_path, "chunks.names")
    assert near[-1] == "tests/chunks/test_made.py"
    assert batches(tmp_path, near) == [near[:-1], near[-1:]]


def test_the_fastest_tests_that_run_the_lines_judge() -> None:
    known = {
        "slow": Known(9.0, frozenset({1, 2})),
        "slower": Known(9.5, frozenset({2})),
        "fast": Known(1.0, frozenset({2, 3})),
        "elsewhere": Known(0.1, frozenset({4})),
        "endless": Known(99.0, frozenset({5})),
    }
    assert [*that_judge(known, range(1, 4))] == ["fast", "slow"]
    assert [*that_judge(known, [5])] == ["endless"], "at least one"
    assert not that_judge(known, [6])


def test_the_lines_of_a_mutant_are_those_of_its_statement() -> None:
    source = SOURCE.splitlines()
    for mutant in mutants_of(SOURCE):
        lines = [source[line - 1].strip() for line in lines_of(SOURCE, mutant)]
        if lines[0].startswith("def"):
            assert lines[-1] == "return True", "a default is seen wherever the function is called"
        else:
            assert lines == [source[mutant.line - 1].strip()]


@pytest.mark.long
@pytest.mark.servers
def test_mutants_are_killed_or_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree of two files; a mutant that never ends is killed too.

    Tests for which there is no time to learn judge nothing, and take nothing from the others.
    """
    root = tmp_path / "root"
    (root / "lmcache_redis").mkdir(parents=True)
    (root / "tests").mkdir()
    source = "def f(n):\n    while n:\n        n -= 1\n    return n == 0, n < 9\n"
    source += "\n\ndef g(n):\n    return n + 1\n\n\ndef h(n):\n    return n + 1\n"
    (root / "lmcache_redis" / "__init__.py").write_text("")
    (root / "lmcache_redis" / "small.py").write_text(source)
    (root / "tests" / "test_small.py").write_text(
        "import subprocess, sys\nfrom lmcache_redis.small import f\n\n\n"
        "def test_f():\n    assert f(4)[0]\n\n\n"
        "def test_that_fails():\n    assert f(4)[1] == 2\n\n\n"
        "def test_g_in_another_process():\n"
        "    said = 'from lmcache_redis.small import g; assert g(1) == 2'\n"
        "    subprocess.run([sys.executable, '-c', said], check=True)\n"
    )
    hanging = "import time\nfrom lmcache_redis.small import f\n\n\ndef test_f():\n    f(4)\n"
    hanging += "\n\ndef test_that_hangs():\n    time.sleep(600)\n"
    for name in ("test_early.py", "test_of_small.py"):
        (root / "tests" / name).write_text(hanging)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["unit", "servers"]\n'
        'addopts = ["--import-mode=importlib"]\n'
    )
    (root / "tests" / "mutants").mkdir()
    for name in ("forking.py", "plugin.py", "tracing.py"):
        shutil.copy(Path(runner.__file__).with_name(name), root / "tests" / "mutants")
    (root / "conftest.py").write_text(
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        "    [item.add_marker('unit') for item in items]\n"
    )
    monkeypatch.setattr(runner, "ROOT", root)
    monkeypatch.setattr(runner, "_MORE_S", 4.0)
    monkeypatch.setattr(runner, "SLOWEST_TESTS_S", 10.0)
    said: list[str] = []
    with Tree(tmp_path, ["small"]) as tree:
        found = judge(tree, "small", 2.0, 1, said.append)
    assert [*found.tests] == [
        "tests/test_small.py", "tests/test_early.py", "tests/test_of_small.py"
    ]  # fmt: skip
    assert found.untried == 0
    assert found.judged == found.mutants == len(mutants_of(source))
    survived = {(m.kind, m.line, m.text) for m in found.survivors}
    untested = {("bound", 12, "(n) - (1)"), ("bound", 12, "2")}
    assert survived == {("comparison", 4, "<="), ("bound", 4, "10"), ("bound", 3, "2"), *untested}
    assert "lmcache_redis/small.py:4 (comparison)" in "".join(said)
    assert (root / "lmcache_redis" / "small.py").read_text() == source, "never in place"
    assert (tree.root / "lmcache_redis" / "small.py").read_text() == source
