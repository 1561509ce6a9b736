# SPDX-License-Identifier: Apache-2.0
"""A server that dies, stops, fills up, refuses or talks nonsense: every call is answered."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    LEAST_CONNECTIONS,
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
from tests.resp.proxy import Proxy, Stall
from tests.servers import RedisServer, free_port

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 4 * SLOT
GONE = {ReadOutcome.UNAVAILABLE, ReadOutcome.TIMED_OUT}
MISSING = ReadOutcome.MISSING
NOT_STORED = {WriteOutcome.UNAVAILABLE, WriteOutcome.TIMED_OUT}


def check_works(plane: RedisPlane, number: int = 99) -> None:
    """Store and load a chunk, once the plane has found the server again."""
    wait_until(lambda: plane.state.up, "the plane did not find the server again")
    check_moves(plane, Chunk(number, SIZE, SLOT, seed=number))


# -------------------------------------------------------------------- killed


@BOTH_WAYS
def test_killed_while_idle_and_restarted_empty(own_server: RedisServer) -> None:
    with running(own_server.url, heartbeat_s=3600.0) as plane:
        check_works(plane)
        # One that connects while the server is away would notice.
        wait_until(lambda: plane.stats().connects >= LEAST_CONNECTIONS)
        own_server.restart()
        # Nobody has noticed: old connections are replaced, calls are not lost.
        chunk = Chunk(1, SIZE, SLOT, seed=1)
        assert scan(plane, [chunk_key(99)]) == (CallOutcome.DONE, 0)
        check_moves(plane, chunk)
        assert read(plane, Chunk(99, SIZE, SLOT)) == [MISSING]
        assert plane.state.up
        assert plane.stats().connections_lost >= 3


@BOTH_WAYS
def test_killed_in_the_middle_of_loads(own_server: RedisServer) -> None:
    with Proxy(own_server.port) as proxy, running(proxy.url, connections=2) as plane:
        chunks = [Chunk(n, SIZE, SLOT, seed=n) for n in range(20)]
        check_stores(plane, *chunks)
        proxy.for_gets.extend([None] * 13 + [Stall(1000)] * 2)
        answers = Answers()
        for chunk in chunks:
            plane.load_all((chunk.io(),), answers)
        # Replies are received in the order of their requests: behind one that stalls, none is.
        wait_until(lambda: proxy.gets >= 14)
        own_server.kill()
        outcomes = answers.wait(20)
        proxy.for_gets.clear()
        # 13 stripes came; those that did not may be of one of the first three chunks.
        assert outcomes.count(ReadOutcome.LOADED) in (2, 3)
        assert set(outcomes) <= {ReadOutcome.LOADED, *GONE}
        assert scan(plane, [chunk_key(0)]).outcome is CallOutcome.UNAVAILABLE
        own_server.start()
        check_works(plane)
        assert read(plane, chunks[0]) == [ReadOutcome.MISSING]


@BOTH_WAYS
def test_a_restart_in_the_middle_of_a_store_makes_no_half_chunk(own_server: RedisServer) -> None:
    """Stripes acknowledged before the restart are gone, so stripe 0 must not follow."""
    with Proxy(own_server.port) as proxy, running(proxy.url, connections=2) as plane:
        check_works(plane)
        acknowledged = proxy.acknowledged
        proxy.hold_after = acknowledged + 8
        answers = Answers()
        plane.store_all((Chunk(1, 40 * SLOT, SLOT, seed=1).io(),), answers)
        wait_until(lambda: proxy.acknowledged >= acknowledged + 8)
        own_server.restart()
        proxy.cut_all()
        proxy.acknowledge.set()
        assert answers.wait(1)[0] in NOT_STORED
        check_works(plane)
        assert not own_server.command("EXISTS", first_key(1))


@BOTH_WAYS
def test_idle_connections_cut_before_a_store_cost_nothing(proxy: Proxy) -> None:
    with running(proxy.url, heartbeat_s=3600.0) as plane:
        check_works(plane)
        # One that connects or probes while it is cut would notice.
        wait_until(lambda: plane.stats().connects >= LEAST_CONNECTIONS)
        for number in range(3):
            proxy.cut_all()
            check_works(plane, number)


# ------------------------------------------------------------------- stopped


@BOTH_WAYS
def test_stopped_past_the_deadline_then_continued(own_server: RedisServer) -> None:
    with running(own_server.url, op_timeout_s=1.0) as plane:
        check_works(plane)
        own_server.stop()
        started = time.monotonic()
        answers = Answers()
        for number in range(8):
            plane.load_all((Chunk(99, SIZE, SLOT).io(0.2),), answers)
            plane.store_all((Chunk(number, SIZE, SLOT).io(0.2),), answers)
        plane.scan([chunk_key(99)], started + 0.2, answers.callback("scan"))
        outcomes = answers.wait(17)
        # What waits on a socket may be a little late; nothing waits for the next thing to fail.
        assert time.monotonic() - started < 5.0
        assert ReadOutcome.TIMED_OUT in outcomes
        wait_until(lambda: not plane.state.up)
        assert "answer" in plane.state.reason
        # From here on nobody waits for it.
        assert read(plane, Chunk(99, SIZE, SLOT)) == [ReadOutcome.UNAVAILABLE]
        own_server.cont()
        check_works(plane)


def test_a_slow_answer_is_no_outage(proxy: Proxy) -> None:
    """A GET that never ends costs its chunk; a server that answers PING stays up."""
    with running(proxy.url, op_timeout_s=0.5) as plane:
        check_works(plane)
        for after_bytes in (1, 4000):
            proxy.for_gets.append(Stall(after_bytes))
            assert read(plane, Chunk(99, SIZE, SLOT)) == [ReadOutcome.TIMED_OUT]
        assert plane.state.up
        check_works(plane)


# ---------------------------------------------------------- starts and ends


@pytest.mark.servers
def test_started_after_us(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path)
    with caplog.at_level(logging.INFO), running(server.unix_url) as plane:
        assert not plane.state.up
        with server:
            check_works(plane)
            # Before the server ends: the plane may notice that, and say so.
            downs = [r for r in caplog.records if "is down" in r.message]
            ups = [r for r in caplog.records if "is up again" in r.message]
            assert (len(downs), len(ups)) == (1, 1)


def test_too_few_connections(own_server: RedisServer) -> None:
    with own_server.client() as administrator:
        administrator.config_set("maxclients", 3)
        with running(own_server.url) as plane:
            wait_until(lambda: "maxclients" in plane.state.reason)
            assert read(plane, Chunk(1, SIZE, SLOT)) in ([ReadOutcome.UNAVAILABLE], [MISSING])
            administrator.config_set("maxclients", 100)
            wait_until(lambda: plane.stats().connects >= 4 and plane.state.up)
            check_works(plane)


# ------------------------------------------------------------- full and busy


@BOTH_WAYS
def test_full_without_eviction(own_server: RedisServer) -> None:
    with running(own_server.url) as plane:
        own_server.config_set("maxmemory-policy", "noeviction")
        used = own_server.command("INFO", "memory")["used_memory"]
        own_server.config_set("maxmemory", str(used + (32 << 20)))
        chunks = [Chunk(n, 4 << 20, 1 << 19, seed=n) for n in range(12)]
        outcomes = [write(plane, chunk)[0] for chunk in chunks]
        assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.FULL}
        assert "maxmemory" in plane.state.reason
        assert plane.state.up
        stored = [c for c, o in zip(chunks, outcomes, strict=True) if o is WriteOutcome.STORED]
        refused = [chunk for chunk in chunks if chunk not in stored]
        check_loads(plane, *stored)
        assert set(read(plane, *refused)) == {ReadOutcome.MISSING}
        own_server.config_set("maxmemory", "0")
        # Not sent for a moment.
        wait_until(lambda: set(write(plane, *chunks)) == {WriteOutcome.STORED})


def test_full_while_replacing_delivers_no_mixture(own_server: RedisServer) -> None:
    with running(own_server.url) as plane:
        chunk = Chunk(1, 4 << 20, 1 << 19, seed=1)
        check_stores(plane, chunk)
        own_server.config_set("maxmemory", "1mb")
        assert write(plane, chunk) == [WriteOutcome.FULL]
        assert read(plane, chunk)[0] in (ReadOutcome.LOADED, ReadOutcome.TORN)
        own_server.config_set("maxmemory", "0")
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        assert read(plane, chunk) == [ReadOutcome.LOADED]


def test_single_stripes_evicted(own_server: RedisServer) -> None:
    own_server.config_set("maxmemory-policy", "allkeys-random")
    with running(own_server.url) as plane:
        used = own_server.command("INFO", "memory")["used_memory"]
        own_server.config_set("maxmemory", str(used + (4 << 20)))
        chunks = [Chunk(n, 1 << 20, 1 << 17, seed=n) for n in range(12)]
        check_stores(plane, *chunks)
        for chunk in chunks:
            loaded = chunk.empty()
            (outcome,) = read(plane, loaded)
            assert outcome in (ReadOutcome.LOADED, ReadOutcome.INCOMPLETE, ReadOutcome.MISSING)
            if outcome is ReadOutcome.LOADED:
                assert loaded.content == chunk.content


def test_a_server_busy_with_a_script(own_server: RedisServer) -> None:
    # Since 7.0 called busy-reply-threshold too.
    own_server.config_set("lua-time-limit", "1")
    with running(own_server.url) as plane:
        check_works(plane)

        def block() -> None:
            with own_server.client(socket_timeout=None) as client:
                try:
                    client.eval("while true do end", 0)
                except Exception:
                    return

        script = threading.Thread(target=block)
        script.start()
        wait_until(lambda: read(plane, Chunk(99, SIZE, SLOT)) == [ReadOutcome.UNAVAILABLE])
        wait_until(lambda: not plane.state.up)
        assert "BUSY" in plane.state.reason
        own_server.command("SCRIPT", "KILL")
        script.join()
        check_works(plane)


def test_a_read_only_replica_rejects_writes(own_server: RedisServer) -> None:
    with running(own_server.url) as plane:
        check_works(plane)
        own_server.command("REPLICAOF", "127.0.0.1", str(free_port()))
        # It may close some of the connections without an answer, in the beginning.
        wait_until(
            lambda: (
                write(plane, Chunk(1, SIZE, SLOT)) == [WriteOutcome.REJECTED]
                and "READONLY" in plane.state.reason
            )
        )
        assert read(plane, Chunk(99, SIZE, SLOT)) == [ReadOutcome.LOADED]


# ------------------------------------------------------------ two at once


@BOTH_WAYS
def test_two_writers_of_one_chunk(server: RedisServer) -> None:
    """Whatever is delivered is whole and of one of them."""
    with running(server.url) as one, running(server.unix_url) as two:
        written: set[bytes] = set()
        for seed in range(10):
            answers = Answers()
            first, second = (Chunk(1, 10 * SLOT, SLOT, seed=s) for s in (seed, 100 + seed))
            one.store_all((first.io(),), answers)
            two.store_all((second.io(),), answers)
            seen = Chunk(1, 10 * SLOT, SLOT)
            written |= {first.content, second.content}
            while len(answers) < 2:
                if read(one, seen) == [ReadOutcome.LOADED]:
                    assert seen.content in written
            assert set(answers.wait(2)) == {WriteOutcome.STORED}
            if read(two, seen) == [ReadOutcome.LOADED]:
                assert seen.content in (first.content, second.content)
            wait_until(lambda: not one._jobs.transfers)


def test_what_is_stored_again_after_an_outage_stays(own_server: RedisServer) -> None:
    """Stripes of a store that failed wait in the queue; they must not cost the next one."""
    with running(own_server.url, probe_interval_s=0.01) as plane:
        for round_ in range(5):
            chunk = Chunk(round_, 200 * SLOT, SLOT, seed=round_)
            answers = Answers()
            plane.store_all((chunk.io(),), answers)
            own_server.kill()
            assert answers.wait(1)[0] in {*NOT_STORED, WriteOutcome.STORED}
            own_server.start()
            wait_until(lambda: plane.state.up)
            wait_until(lambda chunk=chunk: write(plane, chunk) == [WriteOutcome.STORED])
            time.sleep(0.05)
            assert own_server.command("EXISTS", *chunk.stripe_keys()) == chunk.stripe_count
