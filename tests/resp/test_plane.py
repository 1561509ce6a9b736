# SPDX-License-Identifier: Apache-2.0
"""Whole chunks through a real server, and the order in which their stripes become visible."""

from __future__ import annotations

import time

import pytest

from lmcache_redis.chunks.frame import HEADER_BYTES, describe_header
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tiers import ChunkIO, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    Chunk,
    check_moves,
    check_stores,
    plane_threads,
    running,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy
from tests.servers import RedisServer

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SLOT = 4096


@BOTH_WAYS
def test_round_trips_of_all_sizes(server: RedisServer) -> None:
    sizes = [1, 63, 64, 65, 4095, 4096, 4097, 8192, 12_345, 100_000, 1_000_003]
    for url, slot_bytes in ((server.url, SLOT), (server.unix_url, 1 << 20)):
        with running(url) as plane:
            check_moves(
                plane, *(Chunk(n, size, slot_bytes, seed=n) for n, size in enumerate(sizes))
            )
            server.command("FLUSHALL")


@BOTH_WAYS
def test_values_are_what_the_format_says(plane: RedisPlane, server: RedisServer) -> None:
    chunk = Chunk(1, 10_000, SLOT, seed=1)
    before_ms = int(time.time() * 1000)
    check_stores(plane, chunk)
    store_ids = set()
    content = b""
    with server.client() as client:
        assert sorted(client.keys()) == sorted(chunk.stripe_keys())
        for index, key in enumerate(chunk.stripe_keys()):
            value = client.get(key)
            header = describe_header(value[:HEADER_BYTES])
            assert (header.stripe_index, header.stripe_count) == (index, chunk.stripe_count)
            assert before_ms <= header.created_unix_ms <= time.time() * 1000
            store_ids.add(header.store_id)
            content += value[HEADER_BYTES:]
    assert content == chunk.content
    assert len(store_ids) == 1
    check_stores(plane, chunk)
    with server.client() as client:
        again = describe_header(client.get(chunk.stripe_keys()[0])[:HEADER_BYTES])
    assert again.store_id not in store_ids


def test_what_cannot_be_begun_is_refused_at_once(plane: RedisPlane) -> None:
    """One of several that cannot: none is."""
    chunk, answers = Chunk(1, 10_000, SLOT), Answers()
    good = Chunk(2, 10_000, SLOT).io()
    readonly = [memoryview(bytes(slot)) for slot in chunk.slots]
    strided = [memoryview(bytearray(2 * slot.nbytes))[::2] for slot in chunk.slots]
    words = [memoryview(bytearray(slot.nbytes)).cast("H") for slot in chunk.slots[:2]]
    for slots in (chunk.slots[:-1], chunk.slots[::-1], readonly, strided, words):
        with pytest.raises(ValueError, match="slot"):
            plane.load_all(
                (good, ChunkIO(chunk.key, chunk.frame, slots, time.monotonic() + 1)), answers
            )
    with pytest.raises(RuntimeError, match="already"):
        plane.store_all([good, good], answers)
    assert len(answers) == 0
    assert not plane._jobs.transfers
    plane.store_all([], answers)


# ------------------------------------------------------- stripe 0 comes last


@BOTH_WAYS
def test_stripe_0_waits_for_all_others(proxy: Proxy, server: RedisServer) -> None:
    one, two = Chunk(1, 5 * SLOT, SLOT, seed=1), Chunk(2, 4 * SLOT, SLOT, seed=2)
    with running(proxy.url, connections=3) as plane:
        # All three connections are open before their replies are held back.
        assert write(plane, Chunk(0, 8 * SLOT, SLOT)) == [WriteOutcome.STORED]
        server.command("FLUSHALL")
        proxy.stripes_set.clear()
        proxy.acknowledge.clear()
        answers = Answers()
        plane.store_all((one.io(),), answers)
        wait_until(lambda: len(proxy.stripes_set) == 3)
        plane.store_all((two.io(),), answers)
        # Now three replies and no more: stripe 4 of the first chunk stays unacknowledged.
        proxy.hold_after = proxy.acknowledged + 3
        proxy.acknowledge.set()
        sent = [(one.key, index) for index in (1, 2, 3, 4)] + [(two.key, 1), (two.key, 2)]
        wait_until(lambda: len(proxy.stripes_set) == len(sent))
        wait_until(lambda: server.command("DBSIZE") == len(sent))
        # Each has a connection of its own, so that those under way come in any order.
        assert sorted(proxy.stripes_set[:3]) == sent[:3]
        assert sorted(proxy.stripes_set[3:]) == sent[3:]
        assert len(answers) == 0
        proxy.acknowledge.set()
        assert set(answers.wait(2)) == {WriteOutcome.STORED}
        last = proxy.stripes_set[len(sent) :]
        assert sorted(last) == [(one.key, 0), (two.key, 0), (two.key, 3)]
        assert last.index((two.key, 3)) < last.index((two.key, 0))


# ----------------------------------------------------------------- the ends


@BOTH_WAYS
def test_close_finishes_writes_and_cancels_the_rest(server: RedisServer) -> None:
    plane = RedisPlane(RedisOptions(server.url))
    plane.start()
    plane.wait_probed(PATIENCE_S)
    written, loaded = Answers(), Answers()
    for number in range(20):
        plane.store_all((Chunk(number, 40_000, SLOT, seed=number).io(),), written)
    for number in range(200):
        plane.load_all((Chunk(number, 40_000, SLOT).io(),), loaded)
    assert plane.close(PATIENCE_S)
    assert set(written.wait(20, 0)) == {WriteOutcome.STORED}
    assert set(loaded.wait(200, 0)) <= {
        ReadOutcome.CANCELLED,
        ReadOutcome.MISSING,
        ReadOutcome.INCOMPLETE,
        ReadOutcome.LOADED,
    }
    assert plane_threads() == []
    assert plane.close(0)
    with pytest.raises(RuntimeError):
        plane.load_all((Chunk(1, 100, SLOT).io(),), loaded)


def test_use_before_start_and_twice(server: RedisServer) -> None:
    plane = RedisPlane(RedisOptions(server.url))
    with pytest.raises(RuntimeError):
        plane.scan([], 0.0, lambda result: None)
    assert plane.close(0)
    plane.start()
    with pytest.raises(RuntimeError):
        plane.start()
    assert plane.close(1)
