"""What a plane removes and what it stores: a removal never takes a stripe of a later store."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lmcache_redis.resp import ReadOutcome, RedisPlane, WriteOutcome
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    Chunk,
    chunk_key,
    first_key,
    open_all,
    read,
    running,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 4 * SLOT


def damage(server: RedisServer, chunk: Chunk) -> None:
    server.command("SETRANGE", chunk.stripe_keys()[2], "2000", b"damaged")


def wait_removed(plane: RedisPlane) -> None:
    """Until every removal that was queued before has been answered: they are done in order."""
    answers = Answers()
    plane.unlink(chunk_key(1000), 1, time.monotonic() + PATIENCE_S, answers.callback("barrier"))
    answers.wait(1)


def start_write(plane: RedisPlane, chunk: Chunk, within_s: float = PATIENCE_S) -> Answers:
    answers = Answers()
    plane.write(chunk.io(within_s), answers)
    return answers


def by_a_read(plane: RedisPlane, server: RedisServer, chunk: Chunk) -> None:
    damage(server, chunk)
    assert read(plane, Chunk(chunk.number, SIZE, SLOT)) == [ReadOutcome.CORRUPT]


def by_a_failed_write(plane: RedisPlane, server: RedisServer, chunk: Chunk) -> None:
    server.config_set("maxmemory", "1mb")
    assert write(plane, chunk) == [WriteOutcome.FULL]
    server.config_set("maxmemory", "0")


def by_the_caller(plane: RedisPlane, server: RedisServer, chunk: Chunk) -> None:
    plane.unlink(chunk.key, chunk.stripe_count)


@pytest.mark.parametrize("remove", [by_a_read, by_a_failed_write, by_the_caller])
def test_a_store_waits_for_the_removal_of_its_chunk(
    own_server: RedisServer, remove: Callable[[RedisPlane, RedisServer, Chunk], None]
) -> None:
    chunk, other = Chunk(1, SIZE, SLOT, seed=1), Chunk(2, SIZE, SLOT, seed=2)
    with Proxy(own_server.port) as proxy, running(proxy.url, set_connections=1) as plane:
        assert write(plane, chunk) == [WriteOutcome.STORED]
        proxy.removals.clear()
        remove(plane, own_server, chunk)
        wait_until(lambda: proxy.removals_seen)
        again = start_write(plane, chunk)
        # Behind it on the only connection: what was queued before is stored by now.
        assert write(plane, other) == [WriteOutcome.STORED]
        proxy.removals.set()
        assert again.wait(1) == [WriteOutcome.STORED]
        wait_removed(plane)
        loaded = Chunk(1, SIZE, SLOT)
        assert read(plane, loaded) == [ReadOutcome.LOADED]
        assert loaded.content == chunk.content


def test_what_is_being_stored_is_not_removed(server: RedisServer, proxy: Proxy) -> None:
    """A reader finds a mixture of an old store and of one in flight, which replaces all of it."""
    with running(proxy.url) as plane:
        chunk = Chunk(1, SIZE, SLOT, seed=1)
        assert write(plane, chunk) == [WriteOutcome.STORED]
        proxy.acknowledge.clear()
        answers = start_write(plane, chunk)
        with server.client() as client:
            ids = [key[8:24] for key in map(client.get, chunk.stripe_keys())]
            wait_until(lambda: client.get(chunk.stripe_keys()[1])[8:24] != ids[0])
        assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.TORN]
        wait_removed(plane)
        proxy.acknowledge.set()
        assert answers.wait(1) == [WriteOutcome.STORED]
        assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.LOADED]


def test_a_removal_without_an_answer_holds_a_store_up_for_a_moment_only(
    server: RedisServer, proxy: Proxy
) -> None:
    with running(proxy.url, op_timeout_s=1.0) as plane:
        chunk = Chunk(1, SIZE, SLOT, seed=1)
        assert write(plane, chunk) == [WriteOutcome.STORED]
        proxy.removals.clear()
        plane.unlink(chunk.key, chunk.stripe_count)
        wait_until(lambda: proxy.removals_seen)
        assert write(plane, chunk) == [WriteOutcome.STORED]
        assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.LOADED]


def test_a_store_that_waits_for_a_removal_keeps_its_deadline(
    server: RedisServer, proxy: Proxy
) -> None:
    with running(proxy.url, op_timeout_s=PATIENCE_S) as plane:
        chunk = Chunk(1, SIZE, SLOT, seed=1)
        proxy.removals.clear()
        plane.unlink(chunk.key, chunk.stripe_count)
        wait_until(lambda: proxy.removals_seen)
        assert write(plane, chunk, within_s=0.05) == [WriteOutcome.TIMED_OUT]
        cancelled, answers = chunk.io(), Answers()
        plane.write(cancelled, answers)
        plane.cancel(cancelled)
        assert answers.wait(1) == [WriteOutcome.CANCELLED]
        proxy.removals.set()
        wait_removed(plane)
        assert not proxy.stripes_set
        assert not server.command("EXISTS", first_key(1))
        assert write(plane, chunk) == [WriteOutcome.STORED]


def test_a_removal_that_was_not_sent_in_time_is_never_sent(
    server: RedisServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_redis.resp.calls._REMOVE_WITHIN_S", 0.05)
    with running(proxy.url, op_timeout_s=PATIENCE_S) as plane:
        blocker, chunk = Chunk(2, SIZE, SLOT, seed=2), Chunk(1, SIZE, SLOT, seed=1)
        assert write(plane, blocker, chunk) == [WriteOutcome.STORED] * 2
        proxy.removals.clear()
        deadline = time.monotonic() + PATIENCE_S
        answers = Answers()
        plane.unlink(blocker.key, blocker.stripe_count, deadline, answers.callback("blocker"))
        wait_until(lambda: proxy.removals_seen)
        plane.unlink(chunk.key, chunk.stripe_count)
        # Waits until the time of the removal behind the blocker has passed.
        assert write(plane, chunk) == [WriteOutcome.STORED]
        proxy.removals.set()
        answers.wait(1)
        wait_removed(plane)
        assert proxy.removals_seen == 2
        assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.LOADED]


def test_a_store_that_was_cancelled_does_not_remove_the_next(proxy: Proxy) -> None:
    """Its stripes are acknowledged later, together with that of the next store."""
    first, second = Chunk(1, 3 * SLOT, SLOT, seed=1), Chunk(1, SLOT, SLOT, seed=2)
    with running(proxy.url, op_timeout_s=PATIENCE_S) as plane:
        open_all(plane)
        proxy.acknowledge.clear()
        sent = len(proxy.stripes_set)
        cancelled, answers = first.io(), Answers()
        plane.write(cancelled, answers)
        wait_until(lambda: len(proxy.stripes_set) == sent + 2)
        plane.cancel(cancelled)
        assert answers.wait(1) == [WriteOutcome.CANCELLED]
        again = start_write(plane, second)
        wait_until(lambda: len(proxy.stripes_set) == sent + 3)
        proxy.acknowledge.set()
        assert again.wait(1) == [WriteOutcome.STORED]
        wait_removed(plane)
        assert read(plane, Chunk(1, SLOT, SLOT)) == [ReadOutcome.LOADED]
