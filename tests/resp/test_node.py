# SPDX-License-Identifier: Apache-2.0
"""Servers of a plane: redirections, threads that cannot start, a primary that moves."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_redis.resp import RedisOptions, RedisPlane, finder
from lmcache_redis.resp.jobs import Jobs
from lmcache_redis.resp.maps import SLOTS, ServerMap
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.node import DataNodes
from lmcache_redis.resp.options import Topology, parse_deployment
from lmcache_redis.resp.routes import slot_of
from lmcache_redis.resp.sources import Doubt
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    SLOW_S,
    Chunk,
    check_moves,
    check_stores,
    chunk_key,
    exists,
    first_key,
    open_streams,
    our_connections,
    plane_threads,
    read,
    refresh,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.trickling import Answer, LyingServer, packed
from tests.servers import RedisServer

SECRET = "s3cret"


def slots_of(*ports: int) -> bytes:
    """The reply to CLUSTER SLOTS of shards on loopback with equal shares."""
    ends = [16384 * number // len(ports) for number in range(len(ports) + 1)]
    rows = zip(itertools.pairwise(ends), ports, strict=True)
    return packed([[first, end - 1, [b"127.0.0.1", port]] for (first, end), port in rows])


def shard(answers: Callable[[list[bytes]], Answer] = lambda words: None) -> LyingServer:
    """The only shard of a cluster."""

    def answer(words: list[bytes]) -> Answer:
        return slots_of(server.port) if words[0] == b"CLUSTER" else answers(words)

    server = LyingServer(answer)
    return server


def cluster_url(server: LyingServer) -> str:
    return f"redis+cluster://agent:{SECRET}@127.0.0.1:{server.port}"


# ------------------------------------------------------- slots without a server


def test_slots_that_no_server_has_are_looked_up_until_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a moment in a failover, from a node that has not heard of all yet."""
    monkeypatch.setitem(finder._REFRESH_S, Topology.CLUSTER, 3600.0)
    is_whole = threading.Event()

    def answer(words: list[bytes]) -> Answer:
        if words[0] != b"CLUSTER":
            return b":0\r\n" if words[0] == b"EXISTS" else None
        whole = slots_of(server.port)
        return whole if is_whole.is_set() else whole.replace(b":16383", b":99")

    key = chunk_key(next(n for n in itertools.count() if slot_of(first_key(n)) > 99))
    server = LyingServer(answer)
    with server, running(cluster_url(server)) as plane:
        assert exists(plane, [key]).outcome is CallOutcome.UNAVAILABLE
        assert plane.state.up
        assert "16,284 slots of the cluster have no server" in plane.state.reason
        is_whole.set()
        wait_until(lambda: exists(plane, [key]).outcome is CallOutcome.DONE)
        assert plane.state.reason == ""


# ------------------------------------------------------------------ redirections


@pytest.mark.parametrize("kind", [b"MOVED", b"ASK"])
def test_invented_addresses_get_neither_threads_nor_the_password(kind: bytes) -> None:
    ports = itertools.count(20_000)

    def answer(words: list[bytes]) -> Answer:
        if words[0] not in (b"EXISTS", b"GET", b"SET"):
            return None
        port = next(ports)
        return b"-%b 1 127.0.0.1:%d\r\n" % (kind, other.port if port % 2 else port)

    with (
        LyingServer() as other,
        shard(answer) as server,
        # It waits so long for a map that names the server.
        running(cluster_url(server), op_timeout_s=0.2) as plane,
    ):
        chunk = Chunk(1, 100, 4096)
        assert read(plane, chunk) == [ReadOutcome.UNAVAILABLE]
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        threads = len(plane_threads())
        keys = [chunk_key(number) for number in range(300)]
        assert scan(plane, keys) == (CallOutcome.UNAVAILABLE, 0)
        assert exists(plane, keys).outcome is CallOutcome.UNAVAILABLE
        assert read(plane, chunk) == [ReadOutcome.UNAVAILABLE]
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert len(plane_threads()) == threads
        assert other.commands == []
        assert plane.state.up
        assert any(SECRET.encode() in words for words in server.commands)


def test_a_redirection_waits_for_the_map_that_names_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked up until then."""
    monkeypatch.setattr(finder, "_MOVED_PAUSE_S", 0.1)
    asked = itertools.count()

    def one(words: list[bytes]) -> Answer:
        if words[0] == b"CLUSTER":
            return slots_of(second.port if next(asked) > 2 else first.port)
        return b"-MOVED 1 127.0.0.1:%d\r\n" % second.port if words[0] == b"GET" else None

    with (
        LyingServer(lambda words: b"$-1\r\n" if words[0] == b"GET" else None) as second,
        LyingServer(one) as first,
        running(cluster_url(first)) as plane,
    ):
        assert read(plane, Chunk(1, 100, 4096)) == [ReadOutcome.MISSING]
        assert b"GET" in {words[0] for words in second.commands}


def test_a_cluster_that_is_down_keeps_its_connections() -> None:
    def answer(words: list[bytes]) -> Answer:
        if words[0] in (b"EXISTS", b"TOUCH", b"GET", b"SET"):
            return b"-CLUSTERDOWN Hash slot not served\r\n"
        return None

    with shard(answer) as server, running(cluster_url(server)) as plane:
        chunk = Chunk(1, 100, 4096)
        for _ in range(20):
            assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
            assert refresh(plane, chunk).outcome is CallOutcome.UNAVAILABLE
            assert read(plane, chunk) == [ReadOutcome.UNAVAILABLE]
            assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert plane.state.up
        assert "CLUSTERDOWN" in plane.state.reason
        stats = plane.stats()
        assert (stats.connects, stats.connections_lost) == (3, 0)
        sets = [words for words in server.commands if words[0] == b"SET"]
        assert len(sets) < 20


# ------------------------------------------------------------------ looking up


def test_more_servers_than_a_cluster_has_are_refused() -> None:
    with LyingServer(lambda words: slots_of(*range(10_000, 11_001))) as server:
        plane = RedisPlane(RedisOptions(cluster_url(server)))
        plane.start()
        wait_until(lambda: plane.state.probed)
        assert "names 1001 servers" in plane.state.reason
        assert plane_threads() == ["lmcr-time", "lmcr-topology"]
        assert plane.close(1.0)


def test_no_map_is_adopted_after_the_end() -> None:
    """A look-up may end after it: nobody would end the threads of its servers."""
    options = RedisOptions("redis+cluster://127.0.0.1:1")
    deployment = parse_deployment(options)
    nodes = DataNodes(deployment, options, Jobs())
    assert (nodes.state.up, nodes.state.probed) == (False, False)
    assert nodes.close(1.0) == 0
    assert not nodes.adopt(ServerMap(deployment.seeds, ((0, SLOTS - 1, 0),)))
    assert nodes.routes.nodes == ()
    assert plane_threads() == []


# ------------------------------------------------------------- too few threads


def failing_start(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Threads of this name cannot start, until what is returned is not empty."""
    again: list[int] = []
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name and not again:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    return again


@pytest.mark.parametrize("name", ["lmcr-control", "lmcr-set-0"])
def test_a_plane_without_threads_does_not_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    failing_start(monkeypatch, name)
    plane = RedisPlane(RedisOptions("redis://127.0.0.1:1"))
    with pytest.raises(RuntimeError, match="can't start"):
        plane.start()
    wait_until(lambda: plane_threads() == [])
    with pytest.raises(RuntimeError, match="not running"):
        scan(plane, [chunk_key(1)])
    assert plane.close(1.0)


def test_a_shard_starts_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = failing_start(monkeypatch, "lmcr-control")
    with shard() as server, running(cluster_url(server)) as plane:
        assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
        assert set(plane_threads()) == {"lmcr-time", "lmcr-topology"}
        again.append(1)
        wait_until(lambda: scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0))


def test_the_threads_of_a_shard_start_with_their_first_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = failing_start(monkeypatch, "lmcr-set-0")
    with shard() as server, running(cluster_url(server)) as plane:
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0)
        assert set(plane_threads()) == {"lmcr-time", "lmcr-topology", "lmcr-control"}
        chunk = Chunk(1, 100, 4096)
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert "can't start" in plane.state.reason
        again.append(1)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        assert set(plane_threads()) == {
            "lmcr-time", "lmcr-topology", "lmcr-control", "lmcr-set-0",
        }  # fmt: skip


def test_servers_that_nobody_has_seen_get_few_threads() -> None:
    """Of a map of 900 invented servers; and all that answer are started."""
    with contextlib.ExitStack() as stack:
        real = [stack.enter_context(LyingServer()) for _ in range(40)]
        first = stack.enter_context(
            LyingServer(
                lambda words: slots_of(*ports, first.port) if words[0] == b"CLUSTER" else None
            )
        )
        ports = [*range(10_000, 10_900)]
        plane = RedisPlane(RedisOptions(cluster_url(first), connect_timeout_s=SLOW_S))
        plane.start()
        stack.callback(plane.close, 1.0)
        wait_until(lambda: len(plane._nodes.routes.nodes) == 901)
        wait_until(lambda: len(plane_threads()) >= 34)
        time.sleep(0.3)  # more would start at once
        assert len(plane_threads()) == 34
        ports[:] = [server.port for server in real]
        plane._nodes.watcher.hint(Doubt.BROKEN)
        wait_until(lambda: plane.state.probed and not plane.state.reason)
        assert len(plane._nodes.routes.nodes) == 41
        assert all(server.commands for server in real)


def test_a_name_that_could_not_be_looked_up_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = failing_start(monkeypatch, "redis-name")
    with LyingServer() as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with running(url, connect_timeout_s=60.0) as plane:
            assert "cannot be reached: can't start" in plane.state.reason
            assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
            again.append(1)
            wait_until(lambda: scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0))


def test_no_thread_of_a_plane_ends_by_an_exception(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever each of them was doing."""
    failed: set[str] = set()
    open_original = socket.socket.connect

    def connect(sock: socket.socket, address: Any) -> None:
        name = threading.current_thread().name
        if name.startswith("lmcr-") and name not in failed:
            failed.add(name)
            raise MemoryError
        open_original(sock, address)

    def answer(words: list[bytes]) -> Answer:
        return b"$-1\r\n" if words[0] == b"GET" else None

    monkeypatch.setattr(socket.socket, "connect", connect)
    with shard(answer) as server, running(cluster_url(server)) as plane:
        chunk = Chunk(1, 100, 4096)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        wait_until(lambda: read(plane, chunk) == [ReadOutcome.MISSING])
        assert open_streams(plane) == 3
        assert failed == {"lmcr-topology", "lmcr-control", "lmcr-get-0", "lmcr-set-0"}
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 0)
        assert caplog.text.count("internal error in a Redis plane thread") == 4


# --------------------------------------------------------- a primary that moves


def test_a_primary_that_moves_behind_its_name(
    own_server: RedisServer, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections stay when it becomes a replica; the name leads to another server by then."""
    primary = [own_server.port]
    look_up = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "primary.test":
            return look_up(host, *args, **kwargs)
        if kwargs["flags"]:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", primary[0]))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    chunk = Chunk(1, 40_000, 4096, seed=1)
    with running("redis://primary.test:6379", heartbeat_s=0.1) as plane:
        check_stores(plane, chunk)
        assert read(plane, chunk) == [ReadOutcome.LOADED]
        own_server.command("REPLICAOF", "127.0.0.1", str(server.port))
        # It may close some of the connections without an answer, in the beginning.
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.REJECTED])
        primary[0] = server.port
        # The questions that find their connection outdated are answered by the next one.
        for _ in range(20):
            assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.DONE
            assert read(plane, chunk)[0] in (ReadOutcome.LOADED, ReadOutcome.MISSING)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        assert server.command("EXISTS", *chunk.stripe_keys()) == chunk.stripe_count
        assert read(plane, chunk) == [ReadOutcome.LOADED]
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 1)
        wait_until(lambda: not our_connections(own_server))
        assert plane.state.up


def test_a_replica_that_is_asked_alone_is_left(
    own_server: RedisServer, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has moved between two connections: what writes is at the primary by then."""
    server.config_set("repl-diskless-sync-delay", "0")
    own_server.command("REPLICAOF", "127.0.0.1", str(server.port))
    # Until then it closes connections.
    wait_until(lambda: own_server.command("INFO")["master_link_status"] == "up")
    has_moved = threading.Event()

    def addresses(self: Connector, deadline: float) -> list[Any]:
        writes = threading.current_thread().name.startswith("lmcr-set")
        found = server if writes or has_moved.is_set() else own_server
        return [(socket.AF_INET, ("127.0.0.1", found.port))]

    monkeypatch.setattr(Connector, "_addresses", addresses)
    chunk = Chunk(1, 40_000, 4096, seed=1)
    with running("redis://primary.test:6379", heartbeat_s=0.1) as plane:
        check_stores(plane, chunk)
        has_moved.set()
        assert our_connections(own_server)
        refresh(plane, chunk, claim_s=1.0)
        wait_until(lambda: not our_connections(own_server))
        wait_until(lambda: plane.state.up)
        check_moves(plane, chunk)
