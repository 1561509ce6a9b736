# SPDX-License-Identifier: Apache-2.0
"""The wall clock may jump: it is written into values, for people, and decides nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lmcache_redis

ROOT = Path(__file__).parent.parent.parent
PACKAGE = Path(lmcache_redis.__file__).parent
WALL_CLOCK = {"time", "time_ns", "ctime", "localtime", "gmtime", "now", "utcnow", "today"}
# `name.attribute` that tells the wall time: time.time, datetime.now, date.today, ...
MODULES = {"time", "datetime", "date"}
# They show times to people, or count bytes by hours, and move no chunk.
TOOLS = {"admin", "cli"}
SHOWN = {
    "agent/limits.py",
    "agent/reports/exported.py",
    "agent/sessions.py",
    "agent/reports/page.py",
    "agent/reports/recording.py",
    "integrations/vllm/reports/stats.py",
    "testing/memory_tier.py",
    "testing/tier_contract.py",
}


def test_nothing_else_reads_the_wall_clock() -> None:
    """Only what is assigned to a name with `unix_s`, `unix_ms` or `unix_ns`: the time that is
    written into a header, that of a lookup, and the one that says when a file was used last."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in TOOLS or name.as_posix() in SHOWN:
            continue
        text = path.read_text()
        if not MODULES & set(re.findall(r"\w+", text)):
            continue
        tree = ast.parse(text, str(path))
        told: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(re.search("unix_[mn]?s", ast.unparse(target)) for target in targets):
                    told |= set(ast.walk(node.value))
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                names = {alias.name for alias in node.names}
                assert not names & WALL_CLOCK, f"{path}: import time, not its functions"
        found += [
            f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in WALL_CLOCK
            and isinstance(node.value, ast.Name | ast.Attribute)
            and ast.unparse(node.value).rpartition(".")[2] in MODULES
            and node not in told
        ]
    assert found == []


def test_nothing_native_reads_the_wall_clock() -> None:
    for path in (*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h")):
        assert not re.findall(r"CLOCK_REALTIME|gettimeofday|\btime\(", path.read_text()), path
