# SPDX-License-Identifier: Apache-2.0
"""Calls about keys: what a cluster is asked, and chunks that are kept."""

from __future__ import annotations

import hashlib
import itertools
import time

import pytest

from lmcache_redis.resp import RedisPlane, listing
from lmcache_redis.resp.net.wire import prefix_pattern
from lmcache_redis.tiers import CallOutcome, ExistsResult, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    PATIENCE_S,
    STEM,
    Chunk,
    check_stores,
    chunk_key,
    clear,
    describe,
    exists,
    first_key,
    read,
    refresh,
    remove,
    running,
    running_as,
    scan,
    write,
)
from tests.resp.test_node import cluster_url, shard
from tests.resp.trickling import Answer, LyingServer
from tests.servers import RedisServer
from tests.topologies import Cluster

SLOT = 4096
BIG = 40_000
KEYS = [chunk_key(number) for number in range(2000)]


def test_a_scan_of_a_cluster_asks_once_about_each_key() -> None:
    asked: list[bytes] = []
    there = {key + bytes(2) for key in KEYS[:300]}

    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"EXISTS":
            return None
        asked.append(words[1])
        return b":%d\r\n" % (words[1] in there)

    with shard(answer) as server, running(cluster_url(server)) as plane:
        assert scan(plane, KEYS) == (CallOutcome.DONE, 300)
        assert len(asked) == len(set(asked)) == len(KEYS)
        assert exists(plane, KEYS).present == [number < 300 for number in range(len(KEYS))]


# ------------------------------------------------------- describe, keys, remove, clear


def list_keys(plane: RedisPlane, limit: int = 1000) -> tuple[CallOutcome, set[bytes]]:
    outcome, found = plane.keys(STEM, time.monotonic() + PATIENCE_S, limit)
    return outcome, set(found)


@pytest.mark.parametrize("kind", ["server", "cluster"])
@pytest.mark.servers
def test_chunks_are_described_listed_and_removed(request: pytest.FixtureRequest, kind: str) -> None:
    chunks, gone = some_chunks(40), chunk_key(77)
    every = {chunk.key for chunk in chunks}
    done = CallOutcome.DONE
    with running(request.getfixturevalue(kind).url) as plane:
        assert scan(plane, [gone]) == (done, 0)
        check_stores(plane, *chunks)
        assert scan(plane, []) == (done, 0)
        assert scan(plane, [*sorted(every), gone, chunks[0].key]) == (done, 40)
        frames = [chunks[0].frame, None, chunks[9].frame]
        assert describe(plane, [chunks[0].key, gone, chunks[9].key]) == (done, frames)
        assert exists(plane, [gone, chunks[3].key])[:2] == (done, [False, True])
        assert exists(plane, [])[:2] == (done, ())
        assert list_keys(plane) == (done, every)
        assert list_keys(plane, 5)[0] is CallOutcome.OVER_LIMIT
        assert remove(plane, chunks[4])[:2] == (done, 10)
        assert remove(plane, chunks[4])[:2] == (done, 0)
        assert list_keys(plane) == (done, every - {chunks[4].key})
        assert clear(plane, STEM)[:2] == (done, 390)
        assert list_keys(plane) == (done, set())


@pytest.mark.parametrize(("room_bytes", "limit"), [(1 << 20, 1 << 60), (1 << 30, 300)])
def test_a_scan_without_end_fills_no_memory(
    room_bytes: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are not asked for, twice the same, and then more than there is room for."""
    monkeypatch.setattr(listing, "MOST_BYTES", room_bytes)
    numbers, steps = itertools.count(), itertools.count()

    def scan(words: list[bytes]) -> bytes | None:
        if words[0] != b"SCAN":
            return None
        ours = next(steps) >= 50
        names = [b"else%d" % next(numbers) for _ in range(100)] + [first_key(7)] * 100
        names += [first_key(next(numbers)) for _ in range(100 if ours else 0)]
        body = b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in names)
        return b"*2\r\n$1\r\n7\r\n*%d\r\n%b" % (len(names), body)

    with LyingServer(scan) as server, running(server.url) as plane:
        outcome, found = list_keys(plane, limit)
        assert outcome is CallOutcome.OVER_LIMIT
        assert all(name.startswith(STEM) for name in found)
        assert sum(map(len, found)) < room_bytes
        assert len(found) <= limit
        assert next(steps) < 300


def test_a_plane_starts_without_a_server() -> None:
    chunk = some_chunks(1)[0]
    unavailable = CallOutcome.UNAVAILABLE
    with running("redis://127.0.0.1:1") as plane:
        assert (plane.state.up, plane.state.probed) == (False, True)
        assert "refuses connections" in plane.state.reason
        assert read(plane, chunk) == [ReadOutcome.UNAVAILABLE]
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert scan(plane, [chunk.key]) == (unavailable, 0)
        assert describe(plane, [chunk.key]) == (unavailable, ())
        assert exists(plane, [chunk.key])[:2] == (unavailable, ())
        assert remove(plane, chunk)[:2] == (unavailable, 0)
        assert clear(plane, STEM)[:2] == (unavailable, 0)
        assert list_keys(plane) == (unavailable, set())
        assert refresh(plane, chunk)[:2] == (unavailable, ())


def test_a_clear_of_several_prefixes_is_one_walk(plane: RedisPlane, server: RedisServer) -> None:
    """Each byte of them stands for itself."""
    common = b"[a-z]*?\\^lmcr2:"
    special = [bytes([each]) * 2 for each in b"[]^-*?\\\0\xff\r\n09az"]
    prefixes = [common + each for each in special] + [common + b"longer"]
    others = [common + bytes([a, b]) for a, b in itertools.pairwise(b"[]^-*?\\\0\xffaz9")]
    others += [common + b"long", b"alm", b"lmcr2:" + special[0]]
    ours = [prefix + b"%d" % n for prefix in prefixes for n in range(200)]
    with server.client() as client:
        client.mset(dict.fromkeys([*ours, *others], b"x"))
        client.config_resetstat()
        assert clear(plane, *prefixes)[:2] == (CallOutcome.DONE, len(ours))
        assert sorted(client.keys()) == sorted(others)
        scans = client.info("commandstats")["cmdstat_scan"]["calls"]
    assert scans < 3 * len(ours) / 512, "512 keys a step"
    with pytest.raises(ValueError, match="not the beginning"):
        clear(plane, *prefixes, b"x")


def test_the_pattern_of_digests_matches_few_others(server: RedisServer) -> None:
    """What the server matches for nothing, it sends for nothing."""
    prefixes = [b"lmcr2:" + hashlib.sha256(b"%d" % n).digest()[:16] for n in range(32)]
    others = [b"lmcr2:" + hashlib.sha256(b"other %d" % n).digest() for n in range(5000)]
    with server.client() as client:
        client.mset(dict.fromkeys([*prefixes, *others], b"x"))
        found = {*client.scan_iter(prefix_pattern(prefixes), count=1000)}
    assert found == {*prefixes}


# ----------------------------------------------------------------------- refresh


def some_chunks(count: int, stripes: int = 10) -> list[Chunk]:
    return [Chunk(number, stripes * 1000, 1000, seed=number) for number in range(count)]


def idle_s(server: RedisServer, chunk: Chunk) -> list[int]:
    return [int(server.command("OBJECT", "IDLETIME", key)) for key in chunk.stripe_keys()]


def test_a_chunk_that_is_refreshed_was_used(server: RedisServer) -> None:
    kept, other = some_chunks(2)
    with running(server.url) as plane:
        check_stores(plane, kept, other)
        time.sleep(2.1)
        assert min(idle_s(server, kept)) >= 2
        assert refresh(plane, kept) == ExistsResult(CallOutcome.DONE, [True])
        assert max(idle_s(server, kept)) <= 1
        assert min(idle_s(server, other)) >= 2


def test_a_chunk_that_lacks_a_stripe_is_not_present(server: RedisServer) -> None:
    chunks = some_chunks(120)
    with running(server.url) as plane:
        assert refresh(plane) == ExistsResult(CallOutcome.DONE, [])
        check_stores(plane, *chunks)
        server.command("UNLINK", chunks[0].stripe_keys()[-1], chunks[77].stripe_keys()[0])
        server.command("CONFIG", "RESETSTAT")
        assert refresh(plane, *chunks).present == [n not in (0, 77) for n in range(120)]
        assert server.command("INFO", "commandstats")["cmdstat_touch"]["calls"] == 1200
        # More stripes than fit a step.
        large = Chunk(500, 1000 * 64, 64, seed=1)
        check_stores(plane, large)
        assert refresh(plane, chunks[1], large, chunks[0]).present == [True, True, False]


def test_a_refresh_begins_the_time_anew(server: RedisServer) -> None:
    chunk, gone = some_chunks(2)
    with running(server.url, ttl_s=5000, ttl_refresh=True) as plane:
        check_stores(plane, chunk)
        for key in chunk.stripe_keys():
            server.command("EXPIRE", key, 100)
        assert refresh(plane, gone, chunk) == ExistsResult(CallOutcome.DONE, [False, True])
        left = [int(server.command("TTL", key)) for key in chunk.stripe_keys()]
        assert min(left) > 4900
    with running(server.url, ttl_s=5000) as plane:
        for key in chunk.stripe_keys():
            server.command("EXPIRE", key, 100)
        assert refresh(plane, chunk) == ExistsResult(CallOutcome.DONE, [True])
        assert max(int(server.command("TTL", key)) for key in chunk.stripe_keys()) <= 100


@pytest.mark.servers
def test_a_refresh_reaches_every_shard(cluster: Cluster) -> None:
    chunks = some_chunks(60)
    with running(cluster.url, ttl_s=5000, ttl_refresh=True) as plane:
        check_stores(plane, *chunks)
        kept = chunks[5].stripe_keys()
        node = cluster.node_of(kept[0])
        for key in kept:
            node.command("EXPIRE", key, 100)
        lost = chunks[7].stripe_keys()[3]
        cluster.node_of(lost).command("UNLINK", lost)
        assert refresh(plane, *chunks) == ExistsResult(
            CallOutcome.DONE, [n != 7 for n in range(60)]
        )
        for key in chunks[5].stripe_keys():
            assert int(cluster.node_of(key).command("TTL", key)) > 4900


@pytest.mark.parametrize("refused", ["touch", "expire"])
def test_a_server_that_keeps_nothing_still_says_what_it_has(
    server: RedisServer, refused: str
) -> None:
    """Else nothing would be stored: what is not known is not written."""
    ttl = {"ttl_s": 100, "ttl_refresh": True} if refused == "expire" else {}
    stored, lacking = Chunk(1, 100_000, 4096, seed=1), Chunk(2, 100_000, 4096)
    with running_as(server, "+@all", f"-{refused}", **ttl) as plane:
        check_stores(plane, stored)
        assert refresh(plane, stored, lacking)[:2] == (CallOutcome.DONE, [True, False])
        assert plane.stats().refused["NOPERM"] > 0
