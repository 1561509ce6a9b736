"""Chunks that are stored while their slots are still being filled."""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.resp import ReadOutcome, RedisPlane, WriteOutcome
from lmcache_redis.resp.jobs import JobRegistry
from lmcache_redis.resp.queues import TaskQueue
from lmcache_redis.resp.writejob import AnyWrite, WriteJob
from tests.resp.helpers import (
    PATIENCE_S,
    Answers,
    Chunk,
    first_key,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.servers import RedisServer
from tests.topologies import running_cluster

SLOT = 4096
STRIPES = 5
SIZE = STRIPES * SLOT - 100


def stripes_at(server: RedisServer, chunk: Chunk) -> list[int]:
    """Which of the chunk's stripes the server has."""
    with server.client() as client:
        return [n for n, key in enumerate(chunk.stripe_keys()) if client.exists(key)]


def is_loaded_back(plane: RedisPlane, chunk: Chunk) -> bool:
    loaded = Chunk(chunk.number, SIZE, SLOT)
    return read(plane, loaded) == [ReadOutcome.LOADED] and loaded.content == chunk.content


@pytest.mark.usefixtures("both_ways")
def test_a_stripe_is_sent_when_its_slot_is_filled_and_the_first_at_the_end(
    server: RedisServer, plane: RedisPlane
) -> None:
    chunk, answers = Chunk(1, SIZE, SLOT), Answers()
    content = Chunk(1, SIZE, SLOT, seed=1)
    io = chunk.io()
    plane.write_filling(io, answers)
    for filled in range(1, STRIPES):
        # Only now: what is sent before would be zeros.
        chunk.slots[filled - 1][:] = content.slots[filled - 1]
        plane.filled(io, filled)
        sent = list(range(1, filled))
        wait_until(lambda sent=sent: stripes_at(server, chunk) == sent)
        assert scan(plane, [first_key(1)]).prefix_length == 0
        assert len(answers) == 0
    chunk.slots[-1][:] = content.slots[-1]
    plane.filled(io, STRIPES)
    assert answers.of([io]) == [WriteOutcome.STORED]
    assert is_loaded_back(plane, content)
    # Too late to matter.
    plane.filled(io, STRIPES)
    plane.cancel(io)
    assert len(answers) == 1


@pytest.mark.parametrize("size", [SIZE, 100])
def test_all_at_once_is_a_store_like_any_other(plane: RedisPlane, size: int) -> None:
    chunk, answers = Chunk(1, size, SLOT, seed=1), Answers()
    io = chunk.io()
    plane.write_filling(io, answers)
    with pytest.raises(RuntimeError, match="already"):
        plane.write(io, answers)
    plane.filled(io, chunk.stripe_count)
    assert answers.of([io]) == [WriteOutcome.STORED]
    assert plane.stats().bytes_out == size


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("filled", [0, 1, 3, STRIPES - 1])
def test_who_cannot_fill_it_all_cancels_it_and_nothing_remains(
    server: RedisServer, plane: RedisPlane, filled: int
) -> None:
    chunk, answers = Chunk(1, SIZE, SLOT, seed=1), Answers()
    io = chunk.io()
    plane.write_filling(io, answers)
    plane.filled(io, filled)
    wait_until(lambda: stripes_at(server, chunk) == list(range(1, filled)))
    plane.cancel(io)
    assert answers.of([io]) == [WriteOutcome.CANCELLED]
    wait_until(lambda: stripes_at(server, chunk) == [])
    assert write(plane, chunk) == [WriteOutcome.STORED]
    assert is_loaded_back(plane, chunk)


def test_a_deadline_ends_what_is_never_filled(server: RedisServer, plane: RedisPlane) -> None:
    chunk, answers = Chunk(1, SIZE, SLOT, seed=1), Answers()
    io = chunk.io(within_s=0.2)
    plane.write_filling(io, answers)
    plane.filled(io, 3)
    assert answers.of([io]) == [WriteOutcome.TIMED_OUT]
    wait_until(lambda: stripes_at(server, chunk) == [])


def test_whoever_reads_an_older_store_gets_it_whole_or_not_at_all(
    server: RedisServer, plane: RedisPlane
) -> None:
    """The old chunk or none, never a mixture of both."""
    old, new, answers = Chunk(1, SIZE, SLOT, seed=1), Chunk(1, SIZE, SLOT, seed=2), Answers()
    assert write(plane, old) == [WriteOutcome.STORED]
    io = new.io()
    plane.write_filling(io, answers)
    assert is_loaded_back(plane, old)
    with server.client() as client:
        before = client.get(new.stripe_keys()[1])
        plane.filled(io, 2)
        wait_until(lambda: client.get(new.stripe_keys()[1]) != before)
    assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.TORN]
    plane.filled(io, STRIPES)
    answers.wait(1)
    assert write(plane, new) == [WriteOutcome.STORED]
    assert is_loaded_back(plane, new)


@pytest.mark.usefixtures("both_ways")
def test_a_server_that_restarts_meanwhile_costs_the_chunk(server: RedisServer) -> None:
    """What it had acknowledged is gone: the others alone would make no chunk."""
    chunk, answers = Chunk(1, SIZE, SLOT, seed=1), Answers()
    with running(server.url) as plane:
        io = chunk.io()
        plane.write_filling(io, answers)
        plane.filled(io, 3)
        wait_until(lambda: stripes_at(server, chunk) == [1, 2])
        server.kill()
        server.start()
        plane.filled(io, STRIPES)
        assert answers.of([io]) == [WriteOutcome.UNAVAILABLE]
        wait_until(lambda: plane.state.up)
        assert scan(plane, [first_key(1)]).prefix_length == 0
        assert write(plane, chunk) == [WriteOutcome.STORED]
        assert is_loaded_back(plane, chunk)


def test_without_a_server_it_is_answered_and_filling_it_does_nothing(server: RedisServer) -> None:
    chunk, answers = Chunk(1, SIZE, SLOT, seed=1), Answers()
    with running(server.url) as plane:
        server.kill()
        wait_until(lambda: not plane.state.up)
        io = chunk.io()
        plane.write_filling(io, answers)
        plane.filled(io, 3)
        assert answers.of([io]) == [WriteOutcome.UNAVAILABLE]
        plane.filled(io, STRIPES)
        server.start()


def test_a_plane_that_is_closed_waits_for_it_until_its_deadline(plane: RedisPlane) -> None:
    chunk, answers = Chunk(1, SIZE, SLOT, seed=1), Answers()
    io = chunk.io()
    plane.write_filling(io, answers)
    plane.filled(io, 3)
    started_s = time.monotonic()
    assert plane.close(0.2)
    assert answers.of([io]) == [WriteOutcome.CANCELLED]
    assert time.monotonic() - started_s < PATIENCE_S
    plane.filled(io, STRIPES)


def test_over_all_shards_of_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first stripe waits for those of other servers as well."""
    with (
        running_cluster(tmp_path_factory.mktemp("cluster")) as cluster,
        running(cluster.url) as plane,
    ):
        for number in range(10):
            chunk, answers = Chunk(number, SIZE, SLOT, seed=number), Answers()
            io = chunk.io()
            plane.write_filling(io, answers)
            for filled in range(STRIPES):
                plane.filled(io, filled)
                assert scan(plane, [first_key(number)]).prefix_length == 0
            plane.filled(io, STRIPES)
            assert answers.of([io]) == [WriteOutcome.STORED]
            assert is_loaded_back(plane, chunk)


@given(st.integers(1, 6), st.lists(st.integers(0, 6)), st.randoms())
def test_the_first_stripe_is_queued_once_and_last(count: int, fills: list[int], order) -> None:  # type: ignore[no-untyped-def]
    """In whatever order slots are filled and stripes acknowledged."""
    chunk, answers = Chunk(1, count * 8, 8, seed=1), []
    job = WriteJob(
        chunk.io(), lambda io, outcome: answers.append(outcome), lambda *_: None, JobRegistry(), b""
    )
    queue: TaskQueue[AnyWrite] = TaskQueue()
    job.begin_at([queue] * count)
    events = deque([*(min(each, count) for each in fills), count])
    highest, sent = 0, []
    while events or len(queue):
        if events and (not len(queue) or order.random() < 0.5):
            slots = events.popleft()
            highest = max(highest, slots)
            for target, tasks in job.fill(slots).items():
                target.put(tasks)
            continue
        task = queue.take(wait=False)
        assert task is not None
        assert task[1] < highest
        assert job.begin()
        job.sent()
        job.acknowledge()
        sent.append(task[1])
    assert sorted(sent) == list(range(count))
    assert sent[-1] == 0
    assert answers == [WriteOutcome.STORED]
