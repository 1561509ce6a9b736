# SPDX-License-Identifier: Apache-2.0
"""Chunks in flight: the outcome of a load from its stripes, and the order of a store."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.resp import RedisOptions, health
from lmcache_redis.resp.codecs import Found
from lmcache_redis.resp.failures import Failures
from lmcache_redis.resp.jobs import Jobs, TaskQueue
from lmcache_redis.resp.lanes import BulkWorker
from lmcache_redis.resp.node import DataNode, DataNodes
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.resp.transfers import Read, Sets, Write
from lmcache_redis.tiers import CallOutcome, ChunkIO, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Answers,
    Chunk,
    check_stores,
    open_streams,
    read,
    running,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy
from tests.resp.trickling import LyingServer
from tests.servers import RedisServer

GOOD: Found = b"a" * 16
OTHER: Found = b"b" * 16
GONE, BAD = ReadOutcome.INCOMPLETE, ReadOutcome.CORRUPT


class Answered:
    """A load of three stripes, all in flight."""

    def __init__(self) -> None:
        self.outcomes: list[ReadOutcome] = []
        self.jobs = Jobs()
        self.read = Read(Chunk(1, 300, 100).io(), self._done)
        assert self.jobs.begin_all([(self.read,)] * 3)

    def _done(self, chunk: ChunkIO, outcome: ReadOutcome) -> None:
        self.outcomes.append(outcome)

    def end(self, index: int, found: Found) -> None:
        with self.jobs.lock:
            self.read.ended(index, found)
        self.jobs.conclude((self.read,))


@pytest.mark.parametrize(
    ("ends", "allowed"),
    [
        ((GOOD, GOOD, GOOD), {ReadOutcome.LOADED}),
        ((GOOD, GOOD, OTHER), {ReadOutcome.TORN}),
        ((OTHER, GOOD, GOOD), {ReadOutcome.TORN}),
        ((GOOD, GONE, GOOD), {ReadOutcome.INCOMPLETE}),
        ((GOOD, GONE, GONE), {ReadOutcome.INCOMPLETE}),
        ((GONE, GOOD, GOOD), {ReadOutcome.MISSING}),
        ((GONE, GONE, GONE), {ReadOutcome.MISSING, ReadOutcome.INCOMPLETE}),
        ((GONE, GOOD, OTHER), {ReadOutcome.MISSING, ReadOutcome.TORN}),
        ((BAD, GOOD, GOOD), {ReadOutcome.CORRUPT}),
        ((GOOD, GOOD, BAD), {ReadOutcome.CORRUPT}),
        # Stripe 0 is there, if damaged: whichever is found first.
        ((BAD, GONE, GOOD), {ReadOutcome.CORRUPT, ReadOutcome.INCOMPLETE}),
        ((GOOD, GONE, OTHER), {ReadOutcome.INCOMPLETE, ReadOutcome.TORN}),
    ],
)
def test_of_stripes_in_any_order(ends: tuple[Found, ...], allowed: set[ReadOutcome]) -> None:
    for order in itertools.permutations(range(3)):
        answered = Answered()
        for index in order:
            assert answered.outcomes == []
            answered.end(index, ends[index])
        (outcome,) = answered.outcomes
        assert outcome in allowed, order


# ------------------------------------------------------------------- writing


class Queued:
    """A node that notes what it is to store."""

    is_up = True
    health = SimpleNamespace(failures=Failures("a server"))

    def __init__(self) -> None:
        self.indexes: list[int] = []

    def put_writes(self, tasks: Any, urgent: bool = False) -> None:
        self.indexes += [index for _, index in tasks]


def new_write(stripes: int, number: int = 1) -> Write:
    job = Write(Chunk(number, stripes * 64, 64).io(), lambda chunk, outcome: None, b"", 0)
    job.nodes = (Queued(),) * stripes
    return job


def acknowledge(jobs: Jobs, job: Write) -> None:
    jobs.begin_all([(job,)])
    with jobs.lock:
        is_due = job.ended(1, b"")
    if is_due:
        job.put_first()


def test_stripe_0_follows_the_last_of_the_others() -> None:
    jobs, job = Jobs(), new_write(3)
    acknowledge(jobs, job)
    assert job.nodes[0].indexes == []
    acknowledge(jobs, job)
    assert job.nodes[0].indexes == [0]
    acknowledge(jobs, job)
    assert job.outcome is WriteOutcome.STORED


def test_a_chunk_that_has_failed_gets_no_stripe_0() -> None:
    jobs, job = Jobs(), new_write(3)
    acknowledge(jobs, job)
    jobs.stop((job,), CallOutcome.TIMED_OUT)
    acknowledge(jobs, job)
    assert job.nodes[0].indexes == []
    assert job.outcome is WriteOutcome.TIMED_OUT


def test_no_connection_is_added_while_a_chunk_is_half_stored() -> None:
    """Whatever the number of chunks."""
    options = RedisOptions("redis://127.0.0.1:1")
    nodes = DataNodes(parse_deployment(options), options, Jobs())
    node = DataNode(nodes.deployment.server, nodes, 1)
    stores = Sets(node)
    writer = BulkWorker("set-0", node, TaskQueue(), 4, stores)
    half = [new_write(2, number) for number in range(100)]
    tasks = [((job, 1), b"") for job in half]
    assert stores.may_widen
    for task in tasks:
        writer._end([task])
    assert stores._acknowledged == set(half)
    assert not stores.may_widen
    for task in tasks[1:]:
        writer._end([task])
    assert not stores.may_widen
    assert stores._acknowledged == {half[0]}
    writer._end(tasks[:1])
    assert stores.may_widen


# ------------------------------------------------------------- lying servers


@pytest.mark.parametrize("reply", [b"-LOADING wait\r\n", b"+NO\r\n", b":1\r\n"])
def test_a_store_that_is_not_understood_is_unavailable(reply: bytes) -> None:
    with (
        LyingServer(lambda words: reply if words[0] == b"SET" else None) as server,
        running(server.url) as plane,
    ):
        wait_until(lambda: open_streams(plane) == 3)
        assert write(plane, Chunk(1, 40_000, 4096)) == [WriteOutcome.UNAVAILABLE]


# ---------------------------------------------------------------- real servers


@pytest.mark.usefixtures("both_ways")
def test_nothing_is_sent_after_a_connection_was_lost(own_server: RedisServer) -> None:
    """Until every reply in flight has arrived: the server may have been restarted."""
    chunk = Chunk(1, 200 * 4096, 4096, seed=1)
    with Proxy(own_server.port) as proxy, running(proxy.url, connections=4) as plane:
        check_stores(plane, Chunk(2, 40 * 4096, 4096, seed=2))
        proxy.hold_after = proxy.acknowledged + 20
        answers = Answers()
        plane.store_all((chunk.io(),), answers)
        wait_until(lambda: not proxy.acknowledge.is_set())
        # Until each connection has a stripe in flight.
        time.sleep(0.3)
        links = [link for link in proxy.links if link.name.startswith("set")]
        sent = len(proxy.stripes_set)
        links[0].close()
        time.sleep(0.1)
        assert len(proxy.stripes_set) <= sent + 1
        proxy.acknowledge.set()
        assert answers.wait(1) == [WriteOutcome.UNAVAILABLE]


@pytest.mark.usefixtures("both_ways")
def test_reads_go_on_while_the_server_takes_no_writes(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WRITE_PAUSE_S", 0.05)
    chunk = Chunk(1, 40_000, 4096, seed=1)
    with running(own_server.url, connections=1) as plane:
        check_stores(plane, chunk)
        assert read(plane, chunk) == [ReadOutcome.LOADED]
        wait_until(lambda: open_streams(plane) == 3)
        connects = plane.stats().connects
        own_server.config_set("min-replicas-to-write", "1")
        for number in range(10):
            assert write(plane, Chunk(2 + number, 40_000, 4096)) == [WriteOutcome.REJECTED]
            assert read(plane, chunk) == [ReadOutcome.LOADED]
            time.sleep(0.02)
        assert plane.state.up
        assert "NOREPLICAS" in plane.state.reason
        assert (plane.stats().connects, plane.stats().connections_lost) == (connects, 0)
        own_server.config_set("min-replicas-to-write", "0")
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])


def test_a_load_that_restarts_the_ttl_goes_on_too(own_server: RedisServer) -> None:
    """A GETEX is a write."""
    chunk = Chunk(1, 40_000, 4096, seed=1)
    with running(own_server.url, ttl_s=1000, ttl_refresh=True) as plane:
        check_stores(plane, chunk)
        own_server.config_set("min-replicas-to-write", "1")
        for _ in range(5):
            loaded = Chunk(1, 40_000, 4096)
            assert read(plane, loaded) == [ReadOutcome.LOADED]
            assert loaded.content == chunk.content


@pytest.mark.usefixtures("both_ways")
def test_a_full_server_is_not_sent_every_stripe(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WRITE_PAUSE_S", 600.0)
    with Proxy(own_server.port) as proxy, running(proxy.url) as plane:
        own_server.config_set("maxmemory", "1mb")
        assert write(plane, Chunk(1, 40_000, 4096)) == [WriteOutcome.FULL]
        time.sleep(0.2)
        sent = len(proxy.stripes_set)
        chunks = [Chunk(n, 40_000, 4096) for n in range(2, 20)]
        assert set(write(plane, *chunks)) == {WriteOutcome.FULL}
        assert len(proxy.stripes_set) == sent
