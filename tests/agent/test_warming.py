# SPDX-License-Identifier: Apache-2.0
"""`--warm-bytes` with real servers: what a new agent's host pool is filled with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisOptions, ranking
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.resp.ranking import RankedKeys
from lmcache_redis.tiers import CallOutcome
from tests.acl import documented_url
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer
from tests.topologies import running_cluster

pytestmark = pytest.mark.servers

PROMPTS = [block_hashes(f"prompt {number}", 16) for number in range(3)]
CHUNKS = 4  # of each
CHUNK_BYTES = 3 * 2 * 16 * 64 * 4 * 4
SLOT_BYTES = 64 << 10


def store_all(directory: Path, url: str, **options: Any) -> None:
    with (
        AgentServer(directory / "first", url, **options) as agent,
        Engine(agent.endpoint) as engine,
    ):
        for number, hashes in enumerate(PROMPTS):
            engine.randomize(range(16))
            engine.store(f"store {number}", hashes, range(16))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == CHUNKS * len(PROMPTS)


def warm(agent: AgentServer) -> dict[str, Any]:
    """The agent's report once it has ended."""
    wait_until(lambda: agent.status()["warm"]["done"], "a filled host pool")
    return dict(agent.status()["warm"])


def test_a_new_agent_has_what_was_used_most(tmp_path: Path) -> None:
    """As large as one prompt: that which was used, not those stored before and after."""
    frequency = ("--maxmemory-policy", "allkeys-lfu", "--lfu-log-factor", "0")
    with RedisServer(tmp_path, args=frequency) as redis:
        store_all(tmp_path, redis.unix_url)
        used = {each.hex() for each in PROMPTS[1][3::4]}
        for key in redis.command("KEYS", "lmcr2:*"):
            if any(name in key.hex() for name in used):
                for _ in range(9):
                    redis.command("GETRANGE", key, 0, 0)
        size = CHUNKS * CHUNK_BYTES
        with (
            AgentServer(tmp_path / "new", redis.unix_url, warm_bytes=size) as agent,
            Engine(agent.endpoint) as engine,
        ):
            report = warm(agent)
            assert report == {"chunks": CHUNKS, "bytes": size, "left_chunks": 0, "done": True}
            before = agent.counters()
            for number, hashes in enumerate(PROMPTS):
                request = f"lookup {number}"
                assert engine.lookup(request, hashes) == 16 * 16
                assert engine.retrieve(request, hashes, range(16)) == set()
                engine.scheduler.end_session(request)
            after = agent.counters()
            assert after["hit_chunks_host"] - before["hit_chunks_host"] == CHUNKS
            assert after["hit_chunks_redis"] - before["hit_chunks_redis"] == 2 * CHUNKS
            assert "filling the host pool with the most used of 12 chunks" in agent.log
            assert "filled the host pool with 4 chunks" in agent.log


def test_bytes_that_are_not_the_chunks_are_not_loaded(
    start: Starts, tmp_path: Path, redis_server: RedisServer
) -> None:
    store_all(tmp_path, redis_server.unix_url)
    keys = sorted(redis_server.command("KEYS", "lmcr2:*"))
    (damaged,) = [key for key in keys if hash_tag(PROMPTS[0][3]) in key and key[-1] == 1]
    redis_server.command("SETRANGE", damaged, 700, b"other bytes")
    (lacking,) = [key for key in keys if hash_tag(PROMPTS[0][7]) in key and key[-1] == 1]
    redis_server.command("UNLINK", lacking)
    agent, _ = start("new", warm_bytes="1GiB")
    assert warm(agent)["chunks"] == CHUNKS * len(PROMPTS) - 2
    counters = agent.counters()
    assert (counters["miss_corrupt"], counters["miss_incomplete"]) == (1, 1)


def test_of_another_layout_nothing_is_loaded(
    start: Starts, tmp_path: Path, redis_server: RedisServer
) -> None:
    store_all(tmp_path, redis_server.unix_url)
    agent = start.agent("new", warm_bytes="1GiB")
    assert not agent.status()["warm"]["done"], "no engine has come"
    start.engine(agent, model_name="another/model")
    assert warm(agent)["chunks"] == 0
    start.engine(agent)
    wait_until(lambda: warm(agent)["chunks"] == CHUNKS * len(PROMPTS), "the chunks")


def test_each_node_of_a_cluster_is_asked(start: Starts, tmp_path: Path) -> None:
    cluster = start.enter(running_cluster(tmp_path))
    store_all(tmp_path, cluster.url)
    agent, _ = start("new", url=cluster.url, warm_bytes="1GiB")
    assert warm(agent)["chunks"] == CHUNKS * len(PROMPTS)


def test_a_user_without_the_rights_goes_on(
    start: Starts, tmp_path: Path, redis_server: RedisServer
) -> None:
    url = documented_url(redis_server, "agent")
    store_all(tmp_path, url)
    agent, engine = start("new", url=url, warm_bytes="1GiB")
    assert warm(agent)["chunks"] == 0
    assert agent.log.count("the host pool is not filled (--warm-bytes)") == 1
    assert "(ACL SETUSER USER +object|freq;" in agent.log
    redis = agent.status()["redis"]
    assert {"object|freq", "object|idletime"} <= {*redis["commands"]}
    assert (redis["up"], redis["last_error"]) == (True, None)
    assert engine.lookup("lookup", PROMPTS[0]) == 16 * 16


@pytest.fixture
def plane_of() -> Iterator[Callable[[str], RedisPlane]]:
    planes = []

    def start(url: str) -> RedisPlane:
        planes.append(RedisPlane(RedisOptions(url)))
        planes[-1].start()
        assert planes[-1].wait_probed(30).up
        return planes[-1]

    yield start
    for each in planes:
        each.close(1.0)


def ranked(plane: RedisPlane, prefixes: Sequence[bytes], limit: int = 100) -> RankedKeys:
    results: SimpleQueue[RankedKeys] = SimpleQueue()
    plane.rank(prefixes, limit, time.monotonic() + 30, results.put)
    return results.get(timeout=60)


def test_without_frequencies_the_last_uses_count(
    redis_server: RedisServer, plane_of: Callable[[str], RedisPlane]
) -> None:
    keys = [b"lmcr2:warm %d" % number for number in range(600)]
    with redis_server.client() as client:
        for key in keys:
            client.set(stripe_key(key, 0), b"x")
            client.set(stripe_key(key, 1), b"x")
        client.set(stripe_key(b"lmcr2:other", 0), b"x")
        wait_until(
            lambda: client.object("IDLETIME", stripe_key(keys[-1], 0)) >= 1, "a second without use"
        )
        client.touch(stripe_key(keys[77], 0), stripe_key(keys[5], 0))
    plane = plane_of(redis_server.unix_url)
    found = ranked(plane, [b"lmcr2:warm"])
    assert (found.outcome, found.refused) == (CallOutcome.DONE, "")
    assert len(found.keys) == 100
    assert {*found.keys[:2]} == {keys[5], keys[77]}
    assert {*ranked(plane, [b"lmcr2:warm"], 1000).keys} == {*keys}
    assert {*ranked(plane, [b"lmcr2:warm 7", b"lmcr2:other"]).keys} == {
        b"lmcr2:other",
        *(key for key in keys if key.startswith(b"lmcr2:warm 7")),
    }
    assert ranked(plane, [b"lmcr2:nothing"]).keys == []


def test_keys_of_others_are_not_gone_through_without_end(
    own_server: RedisServer, plane_of: Callable[[str], RedisPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_server.client() as client:
        client.mset({f"of others {number}": "x" for number in range(10_000)})
        monkeypatch.setattr(ranking, "MOST_SCANNED", 2 * ranking.STEP_KEYS)
        plane = plane_of(own_server.unix_url)
        client.config_resetstat()
        assert ranked(plane, [b"lmcr2:warm"]) == RankedKeys(CallOutcome.DONE, [], "")
        assert client.info("commandstats")["cmdstat_scan"]["calls"] == 2
        client.mset({stripe_key(b"lmcr2:warm %d" % number, 0): "x" for number in range(10_000)})
        monkeypatch.setattr(ranking, "MOST_SCANNED", 1 << 20)
        monkeypatch.setattr(ranking, "MOST_ASKED", 1)
        client.config_resetstat()
        assert len(ranked(plane, [b"lmcr2:warm"], 1000).keys) < 1000
        assert client.info("commandstats")["cmdstat_scan"]["calls"] < 10
