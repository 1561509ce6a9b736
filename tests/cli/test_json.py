# SPDX-License-Identifier: Apache-2.0
"""docs/reference/json.md names every field that the commands print, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.tier_kinds import KINDS
from tests.cli.test_admin import run
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

ROOT = Path(__file__).parent.parent.parent
# What this run has none of: a disk, a GPU, a failure, a second use.
ABSENT = (
    *("canaries.distrusted", "disk.", "groups[].damaged", "left", "loads.prefill", "node."),
    *("redis.last_error", "sharing[].apart", "tenants.*.limit", "tenants.*.used"),
    *("tiers.*.last_error", "tiers.*.limit", "tiers.*.used", "warm."),
)
HASHES = block_hashes("prompt", 8)


def documented() -> list[tuple[set[str], set[str]]]:
    """The commands in the heading of each section, and its fields."""
    found = []
    for section in (ROOT / "docs" / "reference" / "json.md").read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        names = set()
        for item in text.partition("\n- ")[2].partition("\n\n")[0].split("\n- "):
            objects, _, listed = item.partition(": ")
            these = re.findall(r"`([^`]+)`", re.sub(r"\s\([^()]*\)", "", listed))
            for each in re.findall(r"`([^`]+)`", objects) or [""]:
                names |= {f"{each}.{name}".removeprefix(".") for name in these}
        found.append((set(re.findall(r"`([a-z]+)", heading)), names))
    return found


def fields(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from fields(each, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, f"{name}[]")
    elif value is not None and value != {}:
        yield name


def covers(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".+"), name) is not None


def test_the_page_names_every_tier() -> None:
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    names = ", ".join(f"`{kind.name}`" for kind in KINDS)
    assert f"- `hit_rate`: `*` ({names}:" in page


@pytest.mark.servers
def test_the_page_has_every_field(tmp_path: Path) -> None:
    printed: dict[str, set[str]] = {}
    with (
        RedisServer(tmp_path) as redis,
        AgentServer(tmp_path / "agent", redis.unix_url) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("r1", HASHES, range(8))
        wait_until(lambda: agent.counter("stored_chunks") == 2, what="two chunks in Redis")
        engine.lookup("r2", HASHES)
        variables = {
            "LMCACHE_REDIS_ENDPOINT": agent.endpoint,
            "LMCACHE_REDIS_URL": redis.unix_url,
            "LMCACHE_REDIS_POOL_BYTE": "1",
        }
        for words in (
            "status", "top --once --interval-s 0.1", "ping", "trust", "version", "inspect",
            "purge --everything --dry-run", "purge --everything --yes", "doctor --no-bandwidth",
            "agent --check",
        ):  # fmt: skip
            done = run(*words.split(), "--json", **variables)
            printed.setdefault(words.split()[0], set()).update(fields(json.loads(done.stdout)))
    assert {each for commands, _ in documented() for each in commands} == {*printed, "gateway"}
    for commands, patterns in documented():
        names = {name for command in commands for name in printed.get(command, ())}
        assert [n for n in sorted(names) if not any(covers(p, n) for p in patterns)] == []
        here = [p for p in sorted(patterns) if not p.startswith(ABSENT)]
        assert [p for p in here if not any(covers(p, n) for n in names)] == []
