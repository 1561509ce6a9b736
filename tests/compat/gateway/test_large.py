# SPDX-License-Identifier: Apache-2.0
"""Large payloads, from and to the memory of a tier."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from lmcache_redis.compat.gateway.wire import object_key_of
from tests.compat.gateway.serving import WAIT_S, DictTier, Serving
from tests.compat.gateway.wire import EXIST, GET, PUT, SUCCEEDED, UINT8, header, key, put

pytestmark = pytest.mark.servers

MIB = 1 << 20
# Memory has room for eight of the large chunks.
LARGE = {"buffer_bytes": 64 * MIB, "memory_bytes": 64 * MIB}


def large(seed: int, nbytes: int = 8 * MIB) -> bytes:
    """Any piece that moves is of a length at which this does not repeat itself."""
    block = random.Random(seed).randbytes(65_537)
    return (block * (nbytes // len(block) + 1))[:nbytes]


@pytest.fixture
def lower() -> DictTier:
    """A tier below memory, which answers questions while its writes wait."""
    return DictTier(holds_writes_only=True)


@pytest.fixture
def large_serving(lower: DictTier) -> Iterator[Serving]:
    with Serving(lower, **LARGE) as serving:
        yield serving


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_disappears_leaves_nothing(large_serving: Serving, how: str) -> None:
    with large_serving.client() as other:
        for cut_off in (1, 256 << 10, 5 * MIB, 8 * MIB - 1):
            other.put(key(1), large(1))
            with large_serving.client() as writer, large_serving.client() as reader:
                writer.send(put(key(1), large(2))[: 186 + cut_off])
                reader.send(header(GET, key(1)))
                reader.receive(cut_off)
                for client in (writer, reader):
                    if how == "reset":
                        linger = struct.pack("ii", 1, 0)
                        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            large_serving.until(open_connections=1, buffer_used_bytes=0)
            assert other.get(key(1)) == large(1)
    large_serving.until(open_connections=0)
    assert large_serving.stats()["closed_connections_error"] == 0
    # Of all the memory that was reserved none is left.
    assert large_serving.pool.used == large_serving.pool.idle == 8 * MIB


def test_a_chunk_that_is_replaced_while_it_is_sent_is_sent_whole(large_serving: Serving) -> None:
    """`tests/objects` has those that are removed or evicted."""
    payload = large(1)
    with large_serving.client() as reader, large_serving.client() as other:
        other.put(key(1), payload)
        assert other.exists(key(1))
        reader.send(header(GET, key(1)))
        assert reader.reply()[:2] == (200, len(payload))
        for number in range(20):
            other.put(key(1), large(number + 2))
            assert other.exists(key(1))
        assert large_serving.pool.pinned == len(payload), "it is still being sent"
        assert reader.receive(len(payload)) == payload
        large_serving.until(payload_bytes_out=len(payload))
        assert other.get(key(1)) == large(21)


def test_nobody_sees_the_bytes_of_another(large_serving: Serving) -> None:
    """Few keys of one size, replaced all the time: every payload says whose it is, throughout."""
    nbytes, problems = MIB, []

    def work(number: int) -> None:
        choose = random.Random(number)
        try:
            with large_serving.client() as client:
                for _ in range(40):
                    which = choose.randrange(3)
                    if choose.random() < 0.5:
                        word = bytes((which, choose.randrange(256), choose.randrange(256), number))
                        client.put(key(which), word * (nbytes // 4))
                    elif (found := client.get(key(which))) is not None:
                        assert found == found[:4] * (nbytes // 4)
                        assert found[0] == which
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert large_serving.stats()["gets_hit"] > 50


# ------------------------------------------------------------------ through the tiers


def test_the_next_payload_comes_while_one_is_written_through(
    large_serving: Serving, lower: DictTier
) -> None:
    lower.open.clear()
    with large_serving.client() as client, large_serving.client() as other:
        client.put(key(1), large(1))
        large_serving.until(requests_put=1, payload_bytes_in=8 * MIB)
        assert client.get(key(1)) == large(1), "from memory, while it is on its way below"
        assert other.get(key(1)) == large(1)
        assert other.exists(key(1))
        assert other.list() == {key(1)}
        client.put(key(2), large(2))
        large_serving.until(payload_bytes_in=16 * MIB, puts_stored=0)
        assert other.get(key(2)) is None, "only one of a connection is on its way"
        client.send(header(EXIST, key(2)))
        lower.open.set()
        assert client.receive(36) == SUCCEEDED
        large_serving.until(puts_stored=2, buffer_used_bytes=0)
        assert object_key_of(key(2)) in lower.chunks


def test_a_client_that_goes_after_a_put_has_put(large_serving: Serving, lower: DictTier) -> None:
    lower.open.clear()
    with large_serving.client() as client:
        client.put(key(1), large(1))
    large_serving.until(requests_put=1, payload_bytes_in=8 * MIB)
    lower.open.set()
    large_serving.until(puts_stored=1, open_connections=0, buffer_used_bytes=0)
    assert large_serving.stats()["closed_connections_abandoned"] == 0
    assert object_key_of(key(1)) in lower.chunks


# ------------------------------------------------------------------ the end


def test_stopping_while_payloads_move(lower: DictTier) -> None:
    with (
        Serving(lower, shutdown_deadline_s=0.3, **LARGE) as serving,
        serving.clients(6) as clients,
    ):
        clients[0].put(key(1), large(1))
        assert clients[0].exists(key(1))
        for client in clients[:3]:
            client.send(header(GET, key(1)))
        for number, client in enumerate(clients[3:]):
            client.send(header(PUT, key(number + 2), 8 * MIB, 1, UINT8, (8 * MIB, 0, 0, 0)))
            client.send(bytes(3 * MIB))
        serving.until(requests_put=4, requests_get=3)
        serving.stop()
        assert all(client.ended() for client in clients)
    assert len(serving.pool) == 1
    assert serving.pool.used == 8 * MIB


def test_stopping_finishes_what_has_begun(lower: DictTier) -> None:
    """A payload that is sent, one that comes, and its write. Whoever is idle goes at once."""
    with (
        Serving(lower, shutdown_deadline_s=10.0, **LARGE) as serving,
        serving.client() as reader,
        serving.client() as writer,
        serving.client() as idle,
    ):
        writer.put(key(1), large(1))
        assert writer.exists(key(1))
        reader.send(header(GET, key(1)))
        request = put(key(2), large(2))
        writer.send(request[: 4 * MIB])
        serving.until(requests_put=2, requests_get=1)
        lower.open.clear()
        stopper = threading.Thread(target=serving.stop)
        stopper.start()
        assert idle.ended()
        with pytest.raises(ConnectionRefusedError):
            serving.client()
        writer.send(request[4 * MIB :])
        assert reader.reply()[:2] == (200, 8 * MIB)
        assert reader.receive(8 * MIB) == large(1)
        serving.until(payload_bytes_in=16 * MIB)
        lower.open.set()
        stopper.join(WAIT_S)
        assert not stopper.is_alive()
        serving.until(puts_stored=2)
        assert writer.ended()
    assert object_key_of(key(2)) in lower.chunks


def test_stopping_does_not_wait_for_a_tier_below(lower: DictTier) -> None:
    lower.open.clear()
    with Serving(lower, shutdown_deadline_s=0.2, **LARGE) as serving:
        with serving.client() as client:
            client.put(key(1), large(1))
            serving.until(payload_bytes_in=8 * MIB)
            serving.stop()
        lower.open.set()
