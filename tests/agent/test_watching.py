# SPDX-License-Identifier: Apache-2.0
"""A scheduler that watches is told which chunks its agent wrote, loaded, evicted and missed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_redis import messages as m
from lmcache_redis.client.scheduler import ChunkWatch
from tests.agent.starts import Starts
from tests.agent.test_disk import agent_with_disk
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

CHUNK_BLOCKS = 4
HASHES = block_hashes("prompt", 12)
NAMES = HASHES[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
QUIET_S = 0.3


class Watcher:
    """Keeps, of every part and tier, the names that are there."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watch = ChunkWatch(engine.scheduler.link, engine.scheduler.ranks)
        self.there: dict[tuple[int, str], set[bytes]] = {}
        self.lost = 0

    def poll(self) -> m.Changes | None:
        ranks, workers = self.engine.scheduler.ranks, self.engine.workers
        ranks.reported({rank: worker.place for rank, worker in enumerate(workers)})
        news = self.watch.take()
        if news is not None:
            self.lost += news.lost
            if news.lost:
                self.there.clear()
            for each in news.changes:
                names = self.there.setdefault((each.part, each.tier_name), set())
                (names.update if each.there else names.difference_update)(each.hashes)
        return news

    def wait(self, part: int, tier: str, names: Sequence[bytes]) -> None:
        def seen() -> bool:
            self.poll()
            return self.there.get((part, tier), set()) == set(names)

        wait_until(seen, what=f"{len(names)} chunks of part {part} in {tier}")

    def hear_nothing(self) -> None:
        until_s = time.monotonic() + QUIET_S
        while time.monotonic() < until_s:
            assert self.poll() is None
            time.sleep(0.01)


def watched(engine: Engine) -> Watcher:
    """A watcher whose first question is at the agent."""
    watcher = Watcher(engine)
    wait_until(lambda: (watcher.poll(), watcher.watch.groups)[1], what="a watch")
    assert engine.scheduler.link.submit(m.Ping).wait(60)
    return watcher


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", redis_server.unix_url) as server:
        yield server


def test_what_is_written_loaded_and_missed(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    engine = start.engine(agent, world_size=2)
    watcher = watched(engine)
    assert watcher.watch.groups == (0, 0)
    engine.store("r1", HASHES, range(12))
    for part in range(2):
        watcher.wait(part, "host", NAMES)
        watcher.wait(part, "redis", NAMES)
    watcher.hear_nothing()

    # A new agent knows nothing, and tells what it finds.
    agent.restart()
    engine.wait_ready()
    lost = watcher.lost
    wait_until(lambda: (watcher.poll(), watcher.lost)[1] > lost, what="the loss")
    wait_until(lambda: (watcher.poll(), watcher.watch.groups)[1], what="a new watch")
    assert engine.lookup("r2", HASHES) == 192
    for part in range(2):
        watcher.wait(part, "host", NAMES)
        watcher.wait(part, "redis", NAMES)

    # What a lookup does not find has gone. Beyond the first such chunk nobody has looked.
    redis_server.command("FLUSHALL")
    engine.scheduler.end_session("r2")
    engine.scheduler.clear()
    wait_until(lambda: agent.status()["pool"]["used_slots"] == 0, what="an empty pool")
    for part in range(2):
        watcher.wait(part, "host", [])
    assert engine.lookup("r3", HASHES) == 0
    watcher.wait(0, "redis", NAMES[1:])


def test_a_hit_of_what_the_pool_has_is_told_again(start: Starts, agent: AgentServer) -> None:
    """The chunks may be older than the watch, or another engine's."""
    with Engine(agent.endpoint) as first:
        first.store("r1", HASHES, range(12))
        agent.wait_idle()
    engine = start.engine(agent)
    watcher = watched(engine)
    watcher.hear_nothing()
    assert engine.lookup("r2", HASHES[:8]) == 128
    watcher.wait(0, "host", NAMES[:2])
    watcher.wait(0, "redis", NAMES[:2])
    # And what is stored again.
    engine.store("r3", HASHES, range(12))
    watcher.wait(0, "host", NAMES)
    watcher.wait(0, "redis", NAMES)


def test_what_the_host_pool_evicts(start: Starts) -> None:
    small = {"pool_bytes": 1 << 20, "slot_bytes": 64 << 10}
    agent, engine = start(**small)
    watcher = watched(engine)
    engine.store("r1", HASHES, range(12))
    watcher.wait(0, "host", NAMES)
    for number in range(8):
        engine.store(f"r{number}", block_hashes(f"other {number}", 12), range(12))
        agent.wait_idle()
    evictions = agent.status()["pool"]["evictions"]
    assert evictions > 3
    assert agent.counter("evictions") == evictions
    counts = {"host": 27 - evictions, "redis": agent.counter("stored_chunks")}

    def all_told() -> bool:
        watcher.poll()
        return {tier: len(watcher.there.get((0, tier), ())) for tier in counts} == counts

    wait_until(all_told, what="evictions")
    assert watcher.there[0, "host"].isdisjoint(NAMES)


def test_what_the_disk_evicts(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        agent_with_disk(tmp_path, redis_server, disk_size="1MiB") as agent,
        Engine(agent.endpoint) as engine,
    ):
        check_evictions_from_disk(agent, engine)


def check_evictions_from_disk(agent: AgentServer, engine: Engine) -> None:
    watcher = watched(engine)
    engine.store("r1", HASHES, range(12))
    watcher.wait(0, "disk", NAMES)
    last: list[bytes] = []
    for number in range(8):
        hashes = block_hashes(f"other {number}", 12)
        last = hashes[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
        engine.store(f"r{number}", hashes, range(12))
        agent.wait_idle()

    def evicted() -> bool:
        watcher.poll()
        on_disk = watcher.there[0, "disk"]
        return on_disk.isdisjoint(NAMES) and {*last} <= on_disk

    wait_until(evicted, what="evictions from the disk")
    assert {*NAMES, *last} <= watcher.there[0, "redis"]


def test_an_engine_with_two_agents_is_not_told(start: Starts, agent: AgentServer) -> None:
    other = start.agent("other")
    engine = start.enter(Engine([agent.endpoint, other.endpoint], world_size=2))
    watcher = Watcher(engine)
    watcher.poll()
    engine.store("r1", HASHES, range(12))
    watcher.hear_nothing()
    assert watcher.watch.groups == ()


def test_nothing_is_noted_when_the_scheduler_has_gone(agent: AgentServer) -> None:
    with Engine(agent.endpoint) as engine:
        watched(engine)
    with Engine(agent.endpoint) as engine:
        engine.store("r1", HASHES, range(12))
        assert engine.lookup("r2", HASHES) == 192
    assert "Traceback" not in agent.log
