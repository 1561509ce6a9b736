# SPDX-License-Identifier: Apache-2.0
"""An agent with a third tier, in a process of its own: `test_third_tier` runs it.

The line of registration is run before anything else of the package reads `KINDS`. In the package it
would be in `tier_kinds`.
"""

# ruff: noqa: E402

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_redis import tier_kinds
from tests.testing.objects import OBJECTS, ObjectTier

assert "lmcache_redis.metrics" not in sys.modules
tier_kinds.KINDS = (*tier_kinds.KINDS, OBJECTS)

import msgspec
from prometheus_client import generate_latest

from lmcache_redis.agent.reports.exported import metrics_of
from lmcache_redis.agent.reports.history import History
from lmcache_redis.agent.reports.page import page
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.cli.shown import frame
from lmcache_redis.cli.status import rows
from lmcache_redis.cli.why import request_lines
from lmcache_redis.client.control import ControlClient
from lmcache_redis.plan.records import LookupRecord
from lmcache_redis.tiers import Backing
from tests.agent.here import AgentHere
from tests.harness import Engine, block_hashes
from tests.servers import RedisServer, wait_until

HASHES, DAMAGED = block_hashes("prompt", 16), block_hashes("damaged", 4)
BLOCKS, OTHERS = range(16), range(16, 32)


def main(directory: Path) -> None:
    with RedisServer(directory) as server:
        with agent_with_objects(directory, server) as here, Engine(here.endpoint) as engine:
            engine.store("stored", HASHES, BLOCKS)
            engine.store("damaged", DAMAGED, range(16, 20))
            stored = ("disk_stored_chunks", "objects_stored_chunks", "stored_chunks")
            wait_until(lambda: [*map(here.counter, stored)] == [5, 5, 5], what="5 chunks each")
            names = [*engine.chunks(HASHES), *engine.chunks(DAMAGED)]
        keep_one_each(directory, server, names)
        with agent_with_objects(directory, server) as here, Engine(here.endpoint) as engine:
            assert engine.lookup("first", HASHES[:4]) == 64
            assert engine.scheduler.hit_tiers("first") == ["disk"]
            assert engine.lookup("all", HASHES) == 256
            tiers = ["host", "disk", "objects", "redis"]
            assert engine.scheduler.hit_tiers("all") == tiers
            assert engine.retrieve("all", HASHES, OTHERS) == set()
            check_faces(here)
            assert engine.lookup("damaged", DAMAGED) == 0
            assert here.counter("miss_objects") == 1
    print("ok")


@contextmanager
def agent_with_objects(directory: Path, server: RedisServer) -> Iterator[AgentHere]:
    tier = ObjectTier(f"file://{directory}/objects")
    with AgentHere(
        directory / "agent",
        server.unix_url,
        [Backing(tier, OBJECTS, 1 << 30)],
        disk_path=str(directory / "disk"),
        disk_size=64 << 20,
    ) as here:
        yield here


def keep_one_each(directory: Path, server: RedisServer, names: Sequence[bytes]) -> None:
    """Two chunks are on disk, the third is an object, the fourth is in Redis. The fifth is a
    damaged object.
    """
    on_disk = names[:2]
    # Keys end with these.
    as_object, damaged, in_redis = (hash_tag(names[at]) for at in (2, 4, 3))
    for path in (directory / "disk").rglob("*.lmcr"):
        if not any(name in path.read_bytes()[:4096] for name in on_disk):
            path.unlink()
    for path in (directory / "objects").iterdir():
        if not path.name.endswith((as_object.hex(), damaged.hex())):
            path.unlink()
        elif path.name.endswith(damaged.hex()):
            path.write_bytes(path.read_bytes()[:-1] + b"\x00\x00")
    with server.client() as client:
        for key in client.keys("*"):
            if in_redis not in key:
                client.delete(key)


def check_faces(here: AgentHere) -> None:
    """Metrics, STATUS, page, `status`, `top`, `why` and recordings know the tier by its name."""
    # What was loaded from Redis, and what the host pool was asked for again.
    wait_until(lambda: here.counter("objects_stored_chunks") == 2, what="two more objects")
    hits = {kind.name: n for kind in tier_kinds.KINDS if (n := here.counter(kind.hits))}
    assert hits == {"host": 1, "disk": 2, "objects": 1, "redis": 1}
    loads = ("disk_loaded_chunks", "objects_loaded_chunks", "loaded_chunks")
    assert [*map(here.counter, loads)] == [2, 1, 1]
    exposed = generate_latest(here.agent.cache.metrics.registry).decode()
    for line in (
        'lmcache_redis_hit_chunks_total{tier="objects"} 1.0',
        'lmcache_redis_loaded_chunks_total{tier="objects"} 1.0',
        'lmcache_redis_stored_chunks_total{tier="objects"} 2.0',
        'lmcache_redis_missed_chunks_total{reason="objects"} 0.0',
        'lmcache_redis_load_seconds_count{tier="objects"} 1.0',
    ):
        assert f"\n{line}\n" in exposed, line
    status = ControlClient(here.endpoint, 10).status()
    assert [*status["tiers"]] == ["disk", "objects", "redis"]
    assert status["hit_rate"]["objects"] == 0.2
    gauges = {each.name: each.samples[0].value for each in metrics_of(status) if each.samples}
    assert gauges["lmcache_redis_objects_up"] == 1
    said = {label: text for label, text, _ in rows(status)}
    assert said["objects"].startswith("up: file://")
    assert "objects 20 %" in said["hit rate"]
    assert "2 chunks in the object store" in said["stored"]
    assert frame(None, status) is not None
    html = page(status, History().minutes(status["counters"], 0.0), [], 0.0, False)
    assert '<span class="pill good">objects is up</span>' in html
    assert '<rect class="objects" x="0.6000" width="0.2000"' in html
    assert ".objects { fill: var(--objects); }" in html
    why = "\n".join(request_lines(ControlClient(here.endpoint, 10).why("all", 1), 0.0))
    assert "1 from objects" in why
    line = LookupRecord(time=0.0, request="r", layout="l", chunks="", hits="hdor")
    assert msgspec.convert(msgspec.to_builtins(line), LookupRecord) == line


if __name__ == "__main__":
    main(Path(sys.argv[1]))
