# SPDX-License-Identifier: Apache-2.0
"""Cuts after every byte, garbage on every connection, LOADING, and the speed afterwards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    CONNECTIONS,
    PATIENCE_S,
    Chunk,
    check_loads,
    check_stores,
    chunk_key,
    our_connections,
    plane_threads,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.proxy import Cut, Forge, Proxy
from tests.servers import RedisServer

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SLOT = 256
SIZE = 2 * SLOT
# `$896\r\n`, 640 bytes of header, 256 of payload, CRLF: long enough for the native extension.
GET_REPLY_BYTES = 904
ROLES = {"get": GET_REPLY_BYTES, "set": len(b"+OK\r\n"), "control": len(b":1\r\n")}


def check_all(plane: RedisPlane, number: int) -> None:
    """Store, find and load a chunk: each may fail, none may lie."""
    chunk = Chunk(number, SIZE, SLOT, seed=number)
    (stored,) = write(plane, chunk)
    assert stored in (WriteOutcome.STORED, WriteOutcome.UNAVAILABLE)
    found = scan(plane, [chunk_key(number)])
    assert found.outcome in (CallOutcome.DONE, CallOutcome.UNAVAILABLE)
    if stored is WriteOutcome.STORED and found.outcome is CallOutcome.DONE:
        assert found.prefix_length == 1
    loaded = Chunk(number, SIZE, SLOT)
    (outcome,) = read(plane, loaded)
    if outcome is ReadOutcome.LOADED:
        assert loaded.content == chunk.content
    elif stored is WriteOutcome.STORED:
        assert outcome is ReadOutcome.UNAVAILABLE


def settled(plane: RedisPlane, number: int) -> None:
    """All is well again."""
    wait_until(lambda: plane.state.up)
    chunk = Chunk(number, SIZE, SLOT, seed=number)
    wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
    assert scan(plane, [chunk_key(number)]) == (CallOutcome.DONE, 1)
    assert read(plane, Chunk(number, SIZE, SLOT)) == [ReadOutcome.LOADED]


@BOTH_WAYS
@pytest.mark.parametrize("role", ROLES)
def test_a_reply_cut_after_every_byte(server: RedisServer, proxy: Proxy, role: str) -> None:
    settings = {"connections": 1, "probe_interval_s": 0.01}
    with running(proxy.url, **settings) as plane:
        settled(plane, 1)
        for after_bytes in range(ROLES[role]):
            proxy.spoil(role, Cut(after_bytes))
            check_all(plane, 2)
            wait_until(lambda: not proxy.is_to_spoil, "nothing was cut")
        settled(plane, 1)
        # Bytes that never came are no reason to delete what is there.
        assert server.command("EXISTS", *Chunk(1, SIZE, SLOT).stripe_keys()) == 2


# `test_bulk` and `test_trickling` have more.
GARBAGE = [b"HTTP/1.1 502 Bad Gateway\r\n\r\n", b"\0" * 3000, b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n"]


@BOTH_WAYS
@pytest.mark.parametrize("role", ROLES)
def test_garbage_on_any_connection(server: RedisServer, proxy: Proxy, role: str) -> None:
    """It costs what was asked there, and nothing else."""
    settings = {"connections": 1, "probe_interval_s": 0.01, "op_timeout_s": 0.3}
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    with running(proxy.url, **settings) as plane:
        for reply in GARBAGE:
            settled(plane, 1)
            proxy.spoil(role, Forge(reply))
            loaded = chunk.empty()
            outcomes = {
                "set": write(plane, Chunk(2, SIZE, SLOT, seed=2))[0].name,
                "control": scan(plane, [chunk_key(1)]).outcome.name,
                "get": read(plane, loaded)[0].name,
            }
            assert not proxy.is_to_spoil
            good = {"set": "STORED", "control": "DONE", "get": "LOADED"}
            assert outcomes.pop(role) in ("UNAVAILABLE", "TIMED_OUT")
            assert outcomes.items() <= good.items()
            assert role == "get" or loaded.content == chunk.content
        settled(plane, 1)
        assert server.command("EXISTS", *chunk.stripe_keys()) == 2


def test_a_server_that_loads_its_data(own_server: RedisServer) -> None:
    """A real one: it has a dump on its disk, and reads it slowly."""
    source = random.Random(1)
    with own_server.client() as client:
        # More than 2 MiB: a server that loads looks at its connections that often.
        client.mset({f"key:{number}": source.randbytes(100_000) for number in range(200)})
        client.save()
    own_server.kill()
    own_server.add_arguments("--key-load-delay", "8000")
    with running(own_server.unix_url, probe_interval_s=0.01) as plane:
        starter = threading.Thread(target=own_server.start)
        starter.start()
        wait_until(lambda: "LOADING" in plane.state.reason.upper(), "LOADING was never said")
        assert read(plane, Chunk(1, SIZE, SLOT)) == [ReadOutcome.UNAVAILABLE]
        assert write(plane, Chunk(1, SIZE, SLOT)) == [WriteOutcome.UNAVAILABLE]
        starter.join()
        settled(plane, 1)
        assert own_server.command("DBSIZE") == 200 + 2


# ------------------------------------------------------- the server's return


def killed(server: RedisServer) -> Callable[[], object]:
    server.kill()
    return server.start


def stopped(server: RedisServer) -> Callable[[], object]:
    server.stop()
    return server.cont


def cut(server: RedisServer) -> Callable[[], object]:
    """Every connection, the server's own clients aside."""
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return lambda: None


@BOTH_WAYS
@pytest.mark.parametrize("fault", [killed, stopped, cut], ids=lambda fault: fault.__name__)
def test_everything_works_again_after_its_return(
    own_server: RedisServer, fault: Callable[[RedisServer], Callable[[], object]]
) -> None:
    """Every connection is back, one of each, and every thread is still there."""
    chunks = [Chunk(n, 4 << 20, (256 << 10) - 4096, seed=n) for n in range(2)]
    wanted = [chunk.content for chunk in chunks]

    def move(plane: RedisPlane) -> list[str]:
        check_stores(plane, *chunks)
        assert scan(plane, [chunk_key(0), chunk_key(1)]) == (CallOutcome.DONE, 2)
        check_loads(plane, *chunks)
        return our_connections(own_server)

    # A machine that is busy may be slow; a fault is noticed by other means than the time-out.
    patient = {"op_timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S, "heartbeat_s": 0.2}
    with running(own_server.url, **patient) as plane:
        wait_until(lambda: len(move(plane)) == CONNECTIONS)
        connections, threads = our_connections(own_server), sorted(plane_threads())
        bring_back = fault(own_server)
        outcomes = read(plane, Chunk(0, 100, 64), Chunk(1, 100, 64), within_s=0.3)
        assert ReadOutcome.LOADED not in outcomes
        bring_back()
        wait_until(lambda: plane.state.up)
        # Connections that died idle are replaced by their first use.
        wait_until(lambda: move(plane) == connections, "not all are back")
        assert sorted(plane_threads()) == threads
        assert [chunk.content for chunk in chunks] == wanted
    wait_until(lambda: not our_connections(own_server), "a connection outlived the plane")
