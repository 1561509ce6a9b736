# SPDX-License-Identifier: Apache-2.0
"""The wall clock may jump: it is written into values, for people, and decides nothing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import lmcache_redis
from tests.servers import RedisServer

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


def test_chunks_move_while_the_clock_jumps(own_server: RedisServer) -> None:
    words = [sys.executable, "-m", "tests.resp.jumping_clock", own_server.url]
    child = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        for said, deed in (("stop", own_server.stop), ("continue", own_server.cont)):
            assert child.stdout.readline().strip() == said
            deed()
            child.stdin.write("done\n")
            child.stdin.flush()
        report = json.loads(child.communicate(timeout=60)[0])
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert child.returncode == 0
    assert report["outcomes"] == ["LOADED", "STORED"]
    assert report["wrong"] == 0
    assert report["found"] == 100
    # In time: not at once, and not after the hour that the clock has jumped.
    assert report["late"] == "TIMED_OUT"
    assert 0.25 < report["late_s"] < 10.0
    assert report["works"]
    assert report["looks"] >= 100, "the bent clock was not the one that was read"
    # No key has a time to live, by which the server's own clock could matter.
    assert all(db["expires"] == 0 for db in own_server.command("INFO", "keyspace").values())


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
