# SPDX-License-Identifier: Apache-2.0
"""Many small chunks at once: each is answered for itself, once, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    chunk_key,
    first_key,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.proxy import Cut, Forge, Proxy
from tests.servers import RedisServer

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SIZE = 4096
COUNT = 100


def some(count: int = COUNT, *, filled: bool = False, first: int = 0) -> list[Chunk]:
    return [Chunk(n, SIZE, SIZE, seed=n if filled else None) for n in range(first, first + count)]


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.cont()


# ---------------------------------------------------------- through a server


@BOTH_WAYS
def test_many_small_chunks_come_and_go_together(plane: RedisPlane) -> None:
    check_moves(plane, *some(filled=True))
    stats = plane.stats()
    assert not plane._jobs.transfers
    assert stats.reads[ReadOutcome.LOADED] == stats.writes[WriteOutcome.STORED] == COUNT
    assert stats.bytes_in == stats.bytes_out == COUNT * SIZE
    assert (stats.errors, stats.connections_lost) == (0, 0)


@BOTH_WAYS
def test_each_is_judged_for_itself(plane: RedisPlane, server: RedisServer) -> None:
    stored = some(12, filled=True)
    check_stores(plane, *stored)
    with server.client() as client:
        client.delete(first_key(1))
        value = bytearray(client.get(first_key(3)))
        value[-1] ^= 1
        client.set(first_key(3), bytes(value))
        client.delete(first_key(5))
        client.rpush(first_key(5), b"a list")
        client.set(first_key(7), client.get(first_key(8)))
        client.set(first_key(9), b"short")
    loaded = some(12)
    outcomes = read(plane, *loaded)
    assert outcomes == [
        {
            1: ReadOutcome.MISSING,
            3: ReadOutcome.CORRUPT,
            5: ReadOutcome.FOREIGN,
            7: ReadOutcome.FOREIGN,
            9: ReadOutcome.FOREIGN,
        }.get(number, ReadOutcome.LOADED)
        for number in range(12)
    ]
    for one, other, outcome in zip(stored, loaded, outcomes, strict=True):
        assert outcome is not ReadOutcome.LOADED or one.content == other.content
    # Nothing was deleted.
    assert scan(plane, [chunk_key(n) for n in range(2, 12)]) == (CallOutcome.DONE, 10)


@BOTH_WAYS
@pytest.mark.parametrize("late", ["read", "write"])
def test_all_are_late_together_and_slots_are_left_alone(own_server: RedisServer, late: str) -> None:
    with running(own_server.url, op_timeout_s=30.0) as plane:
        stored = some(40, filled=True)
        check_stores(plane, *stored)
        answers = Answers()
        chunks = some(40)
        with stopped(own_server):
            before = time.monotonic()
            submit = plane.load_all if late == "read" else plane.store_all
            submit([chunk.io(within_s=0.3) for chunk in chunks], answers)
            outcomes = answers.wait(40)
            assert time.monotonic() - before < PATIENCE_S
            assert {outcome.name for outcome in outcomes} == {"TIMED_OUT"}
            contents = [chunk.content for chunk in chunks]
        # What comes now is for nobody.
        check = some(3, filled=True, first=200)
        wait_until(lambda: set(write(plane, *check)) == {WriteOutcome.STORED})
        check_loads(plane, *check)
        assert [chunk.content for chunk in chunks] == contents
        assert len(answers) == 40
        if late == "write":
            # Each is as it was, or as it was to be, or gone.
            loaded = some(40)
            for n, outcome in enumerate(read(plane, *loaded)):
                if outcome is ReadOutcome.LOADED:
                    assert loaded[n].content in (stored[n].content, contents[n])
                else:
                    assert outcome is ReadOutcome.MISSING


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["read", "write"])
def test_one_is_cancelled_and_the_others_come(own_server: RedisServer, kind: str) -> None:
    with running(own_server.url, op_timeout_s=30.0) as plane:
        check_stores(plane, *some(40, filled=True))
        chunks = some(40, filled=kind == "write")
        ios = [chunk.io() for chunk in chunks]
        answers = Answers()
        submit = plane.load_all if kind == "read" else plane.store_all
        with stopped(own_server):
            submit(ios, answers)
            # The last one waits in the queue, the first one perhaps for its reply.
            plane.cancel(ios[-1])
            plane.cancel(ios[0])
            with pytest.raises(RuntimeError, match="already"):
                submit(ios[5:6], answers)
            assert answers.of(ios[-1:])[0].name == "CANCELLED"
            content = chunks[0].content
        names = [outcome.name for outcome in answers.of(ios)]
        good = "LOADED" if kind == "read" else "STORED"
        assert names == ["CANCELLED", *[good] * 38, "CANCELLED"]
        assert chunks[0].content == content
        plane.cancel(ios[5])
        assert set(read(plane, *some(40)[1:-1])) == {ReadOutcome.LOADED}


@BOTH_WAYS
def test_a_lost_connection_costs_what_was_under_way(proxy: Proxy) -> None:
    with running(proxy.url, connections=2) as plane:
        stored, loaded = some(32, filled=True), some(32)
        check_moves(plane, *stored)
        proxy.for_gets.extend([None] * 9 + [Cut(1000)])
        outcomes = read(plane, *loaded)
        assert outcomes.count(ReadOutcome.LOADED) == 31
        for one, other, outcome in zip(stored, loaded, outcomes, strict=True):
            assert outcome is not ReadOutcome.LOADED or one.content == other.content


@pytest.mark.parametrize("reply", [b"-NOPERM not this one\r\n", b":1\r\n"])
def test_a_refused_store_is_one_chunk(proxy: Proxy, reply: bytes) -> None:
    with running(proxy.url) as plane:
        check_stores(plane, *some(4, filled=True))
        proxy.spoil("set", Forge(reply))
        outcomes = write(plane, *some(40, filled=True, first=10))
        assert outcomes.count(WriteOutcome.STORED) >= 30
        assert set(outcomes) > {WriteOutcome.STORED}
