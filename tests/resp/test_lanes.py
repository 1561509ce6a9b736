# SPDX-License-Identifier: Apache-2.0
"""One thread, several connections: what happens to the others when one is slow, lost or missing."""

from __future__ import annotations

import time

import pytest
import redis

from lmcache_redis.resp.lanes import BulkWorker
from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    CONNECTIONS,
    LEAST_CONNECTIONS,
    Answers,
    Chunk,
    check_moves,
    check_stores,
    first_key,
    open_all,
    open_streams,
    our_connections,
    plane_threads,
    read,
    running,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy, Stall
from tests.servers import RedisServer

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SLOT = 4096
NOT_STORED = {WriteOutcome.UNAVAILABLE, WriteOutcome.TIMED_OUT}


@BOTH_WAYS
def test_what_waits_on_other_connections_is_answered_in_time(
    proxy: Proxy, server: RedisServer
) -> None:
    """One connection hangs; what was asked on others has deadlines of its own."""
    with running(proxy.url, op_timeout_s=30.0) as plane:
        chunks = [Chunk(n, SLOT, SLOT, seed=n) for n in range(3)]
        check_stores(plane, *chunks)
        open_all(plane)
        gets, lost = proxy.gets, plane.stats().connections_lost
        proxy.for_gets.append(Stall(100))
        slow, late = Answers(), Answers()
        stuck = Chunk(0, SLOT, SLOT).io(within_s=2.0)
        plane.load_all((stuck,), slow)
        wait_until(lambda: proxy.gets == gets + 1)
        started = time.monotonic()
        plane.load_all([Chunk(n, SLOT, SLOT).io(within_s=0.2) for n in (1, 2)], late)
        assert set(late.wait(2)) == {ReadOutcome.TIMED_OUT}
        assert time.monotonic() < stuck.deadline, "they waited for the one that hangs"
        assert time.monotonic() - started >= 0.2
        assert slow.wait(1) == [ReadOutcome.TIMED_OUT]
        assert read(plane, Chunk(1, SLOT, SLOT)) == [ReadOutcome.LOADED]
        wait_until(lambda: plane.stats().connections_lost == lost + 3)


@BOTH_WAYS
def test_a_close_answers_what_every_connection_has_in_flight(proxy: Proxy) -> None:
    with running(proxy.url, op_timeout_s=30.0) as plane:
        chunks = [Chunk(n, SLOT, SLOT, seed=n) for n in range(3)]
        check_stores(plane, *chunks)
        proxy.for_gets += [Stall(100)] * 3
        answers = Answers()
        plane.load_all([Chunk(n, SLOT, SLOT).io(within_s=60.0) for n in range(3)], answers)
        wait_until(lambda: proxy.gets == 3)
        assert plane.close(0.1)
        assert answers.wait(3) == [ReadOutcome.CANCELLED] * 3


@BOTH_WAYS
def test_stripes_that_nobody_waits_for_cost_no_connection(server: RedisServer) -> None:
    """Stripe 0 is gone: its chunk is answered while the others are on their way."""
    with running(server.url) as plane:
        chunk = Chunk(1, 32 * SLOT, SLOT, seed=1)
        check_stores(plane, chunk)
        open_all(plane)
        before = plane.stats()
        for _ in range(20):
            server.command("UNLINK", first_key(1))
            assert read(plane, Chunk(1, 32 * SLOT, SLOT)) == [ReadOutcome.MISSING]
        after = plane.stats()
        assert (after.connects, after.connections_lost) == (
            before.connects,
            before.connections_lost,
        )


def test_fewer_connections_than_wanted_then_all(own_server: RedisServer) -> None:
    with own_server.client() as client, running(own_server.url) as plane:
        chunk = Chunk(1, 40 * SLOT, SLOT, seed=1)
        wait_until(lambda: plane.stats().connects >= LEAST_CONNECTIONS)
        client.config_set("maxclients", "6")
        check_stores(plane, chunk)
        assert read(plane, chunk) == [ReadOutcome.LOADED]
        assert open_streams(plane) < CONNECTIONS
        client.config_set("maxclients", "100")
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        # Each thread asks for the rest once a second, when it comes by.
        wait_until(
            lambda: (
                read(plane, chunk) == [ReadOutcome.LOADED]
                and write(plane, chunk) == [WriteOutcome.STORED]
                and len(our_connections(own_server)) == CONNECTIONS
            )
        )


def ids_of(client: redis.Redis, role: str) -> list[str]:
    """Of our connections, as the server numbers them."""
    name = f"lmcache-redis:{role}"
    return [each["id"] for each in client.client_list() if each["name"].startswith(name)]


@BOTH_WAYS
@pytest.mark.parametrize("which", [0, 3])
def test_one_set_connection_lost_makes_no_half_chunk(own_server: RedisServer, which: int) -> None:
    """Each of them in turn, in the middle of a store: what is visible is whole."""
    chunks = [Chunk(n, 64 * SLOT, SLOT, seed=n) for n in range(8)]
    with running(own_server.url, connections=4) as plane:
        check_stores(plane, *chunks)
        with own_server.client() as client:
            ids = ids_of(client, "set")
            answers = Answers()
            ios = [chunk.io() for chunk in chunks]
            plane.store_all(ios, answers)
            wait_until(lambda: len(answers) > which)
            client.client_kill_filter(_id=ids[which])
        outcomes = answers.of(ios)
        assert set(outcomes) <= {WriteOutcome.STORED} | NOT_STORED
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            # Of an older store or of this one.
            assert own_server.command("EXISTS", *chunk.stripe_keys()) == chunk.stripe_count
            if outcome is not WriteOutcome.STORED:
                assert read(plane, chunk)[0] in (ReadOutcome.LOADED, ReadOutcome.TORN)
        check_stores(plane, *chunks)
        assert sum("set" in name for name in our_connections(own_server)) == 4


@BOTH_WAYS
@pytest.mark.parametrize("role", ["get", "set"])
def test_one_connection_that_died_at_rest_costs_nothing(own_server: RedisServer, role: str) -> None:
    """Servers close what is idle for long (`timeout`), one connection sooner than the other."""
    chunks = [Chunk(n, 64 * SLOT, SLOT, seed=n) for n in range(8)]
    with running(own_server.url) as plane, own_server.client() as client:
        open_all(plane)
        for which in range(4):
            client.client_kill_filter(_id=ids_of(client, role)[which])
            check_moves(plane, *chunks)
            assert plane.stats().connections_lost == which + 1
            open_all(plane)


def test_connections_that_die_while_more_are_opened(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is left, and none can be opened: what waits is answered, and no thread fails."""
    original = BulkWorker._widen

    def widen(worker: BulkWorker) -> None:
        if own_server.running:
            own_server.kill()
        original(worker)

    chunk = Chunk(1, 8 * SLOT, SLOT, seed=1)
    with running(own_server.url) as plane:
        check_stores(plane, Chunk(0, SLOT, SLOT))
        monkeypatch.setattr(BulkWorker, "_widen", widen)
        assert set(write(plane, chunk)) <= NOT_STORED
        monkeypatch.undo()
        own_server.start()
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
    assert "internal error" not in caplog.text


@BOTH_WAYS
def test_more_threads_share_the_connections(server: RedisServer) -> None:
    chunks = [Chunk(n, 9 * SLOT, SLOT, seed=n) for n in range(20)]
    with running(server.url, network_threads=3) as plane:
        names = plane_threads()
        assert sum(name.startswith("lmcr-get-") for name in names) == 3
        assert sum(name.startswith("lmcr-set-") for name in names) == 3
        check_moves(plane, *chunks)
        open_all(plane)
