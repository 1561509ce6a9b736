# SPDX-License-Identifier: Apache-2.0
"""Clients that break the protocol, are slow or vanish: only they suffer, and nothing is left."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_redis.compat.gateway import connection, server
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import (
    EXIST,
    FAILED,
    GET,
    HEALTH,
    KEY,
    LIST,
    PUT,
    SUCCEEDED,
    UINT8,
    Client,
    header,
    key,
    put,
)

pytestmark = pytest.mark.servers

MIB = 1 << 20

MALFORMED_KEYS = [
    b"", b"model", b"m@1@0@ab", b"@1@0@ab@half", b"m@1@0@@half", b"m@1@0@~@half",
    b"m@256@0@ab@half", b"m@1@256@ab@half", b"m@-1@0@ab@half", b"m@01@0@ab@half",
    b"m@1@0@AB@half", b"m@1@0@xy@half", b"m@1@0@" + b"ab" * 64 + b"@half",
    b"m@1@0@" + b"a" * 65 + b"@half", b"m@1@0@ab@", b"m@1@0@ab@Half", b"m@1@0@ab@half@",
    b"m@1@0@ab@half@01", b"m@1@0@ab@half@1@2", b"m@1@0@ab@half@%v", b"m@1@0@ab@half@t%v@3",
    b"m\n@1@0@ab@half", b" m@1@0@ab@half", b"m\0@1@0@ab@half", b"\xff@1@0@ab@half",
    "m\u2028@1@0@ab@half".encode(), "m@\u0661@0@ab@half".encode(), b"m@1@0@ab@half\0\0",
]  # fmt: skip
MALFORMED: list[dict[str, Any]] = [
    *({"key": key} for key in MALFORMED_KEYS),
    {"fmt": 9}, {"fmt": -1}, {"dtype": 9}, {"dtype": -1}, {"dtype": 64}, {"location": 3},
    {"location": -1}, {"sizes": (-1, 0, 0, 0)}, {"sizes": (1, 2, 3, -4)},
]  # fmt: skip


def test_a_malformed_request_fails_and_the_connection_goes_on(
    client: Client, backend: DictTier, serving: Serving
) -> None:
    for wrong in MALFORMED:
        for command in (GET, EXIST):
            client.send(header(command, **wrong))
            assert client.receive(36) == FAILED, wrong
        client.send(header(PUT, length=100_000, **wrong) + bytes(100_000))
        assert client.get(KEY) is None, "still in step"
    assert backend.chunks == {}
    assert serving.stats()["malformed_requests"] == 3 * len(MALFORMED)


@pytest.mark.parametrize("length", [-1, -(1 << 31), (1 << 19) + 1, (1 << 31) - 1])
def test_an_impossible_length_ends_the_connection(
    client: Client, serving: Serving, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        client.send(header(PUT, KEY, length))
        assert client.ended()
        for _ in range(5):
            with serving.client() as again:
                again.send(header(PUT, KEY, length))
                assert again.ended()
    (line,) = [each.getMessage() for each in caplog.records]
    assert f"a PUT of {length} bytes" in line
    assert "(a quarter of --buffer-bytes)" in line
    with serving.client() as other:
        assert other.healthy()


def test_an_unknown_command_fails_and_ends_the_connection(serving: Serving) -> None:
    for command in (0, 6, -1, 1 << 30):
        with serving.client() as client:
            client.send(header(command) + bytes(5000))
            assert client.receive(36) == FAILED
            assert client.ended()
        with serving.client() as other:
            assert other.healthy()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.lists(
        st.one_of(st.integers(-2, 9), st.integers(-(1 << 31), (1 << 31) - 1)),
        min_size=9,
        max_size=9,
    ),
    key=st.one_of(
        st.binary(max_size=150), st.just(KEY.encode()), st.sampled_from(MALFORMED_KEYS),
        st.text("m@%01af-~ ", max_size=40).map(str.encode),
    ),
    payload=st.binary(max_size=300),
)  # fmt: skip
def test_any_header_fails_or_ends_its_own_connection(
    fuzzed: Serving, numbers: list[int], key: bytes, payload: bytes
) -> None:
    with fuzzed.client() as other:
        with fuzzed.client() as client:
            client.send(struct.pack("iiiiiiiii150s", *numbers, key.ljust(150)) + payload)
            data = b""
            try:
                client.socket.shutdown(socket.SHUT_WR)
                while part := client.socket.recv(4096):
                    data += part
            except OSError:
                pass  # reset, because the rest was not worth reading
        if numbers[0] in (GET, EXIST) and data:
            assert data[:36] in (FAILED, SUCCEEDED)
        elif numbers[0] == PUT:
            assert data == b"" or len(payload) > 186
        assert other.healthy()
    assert fuzzed.stats()["closed_connections_error"] == 0


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Serving]:
    with Serving(DictTier()) as serving:
        yield serving


def test_a_put_cut_off_anywhere_leaves_nothing(backend: DictTier) -> None:
    """With an orderly end and with a reset, before every byte of header and payload."""
    request = put(KEY, b"a small payload")
    with Serving(backend) as serving:
        for at in range(len(request)):
            for reset in (False, True):
                with serving.client() as client:
                    client.send(request[:at])
                    if reset:
                        linger = struct.pack("ii", 1, 0)
                        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        serving.until(connections=2 * len(request), open_connections=0, buffer_used_bytes=0)
        assert backend.chunks == {}
        stats = serving.stats()
        assert stats["closed_connections_error"] == 0
        assert stats["closed_connections_abandoned"] >= len(request) - 1
        with serving.client() as client:
            assert client.get(KEY) is None


def test_who_sends_too_slowly_is_cut_off(
    backend: DictTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 1.5)
    with (
        Serving(backend) as serving,
        serving.client() as in_header,
        serving.client() as in_payload,
        serving.client() as in_dropped,
        serving.client() as idle,
    ):
        in_header.send(put(KEY, b"x")[:100])
        in_payload.send(put(KEY, bytes(1000))[:-1])
        in_dropped.send(header(PUT, b"malformed", 1000) + b"x")
        serving.until(buffer_used_bytes=1000)
        assert in_header.ended()
        assert in_payload.ended()
        assert in_dropped.ended()
        serving.until(buffer_used_bytes=0, closed_connections_stalled=3)
        assert idle.healthy(), "waiting between requests is allowed"
        assert idle.list() == set()


def test_dripping_does_not_count_as_moving(
    backend: DictTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.3)
    with Serving(backend) as serving, serving.client() as client:
        client.send(header(PUT, KEY, 1000, 1, UINT8, (1000, 0, 0, 0)))
        with contextlib.suppress(ConnectionError):
            for _ in range(999):
                client.send(b"x")
                time.sleep(0.01)
        assert serving.stats()["closed_connections_stalled"] == 1


def test_a_slow_reader_holds_nobody_up(backend: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for more than sockets hold, reads nothing, and is cut off; others do not wait."""
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 2.0)
    payload = bytes(1 << 19)
    with (
        Serving(backend, buffer_bytes=4 << 20) as serving,
        serving.client() as writer,
        serving.client() as slow,
    ):
        writer.put(KEY, payload)
        assert writer.exists(KEY)
        slow.send(header(GET, KEY) * 40)
        time.sleep(0.2)
        for _ in range(10):
            assert writer.get(KEY) == payload
        assert serving.stats()["closed_connections_stalled"] == 0, (
            "nobody had to wait until it was cut off"
        )
        assert serving.stats()["buffer_used_bytes"] <= 2 * len(payload)
        serving.until(closed_connections_stalled=1, buffer_used_bytes=0)
        assert slow.ended()
        assert writer.healthy()


def test_a_reader_that_is_only_slow_gets_everything(
    backend: DictTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 2.0)
    payload = bytes(range(256)) * 2048
    with Serving(backend) as serving, serving.client() as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.put(KEY, payload)
        client.send(header(GET, KEY) * 8)
        for _ in range(8):
            assert client.reply()[:2] == (200, len(payload))
            for at in range(0, len(payload), 1 << 16):
                assert client.receive(1 << 16) == payload[at : at + (1 << 16)]
                time.sleep(0.015)
        assert client.healthy()


def test_a_fault_of_a_tier_ends_one_connection(
    client: Client, backend: DictTier, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with serving.client() as other:
        backend.error = RuntimeError("a fault")
        client.send(put(KEY, b"x" * 5000))
        assert client.ended()
        backend.error = None
        other.put(KEY, b"x")
        assert other.get(KEY) == b"x"
    serving.until(buffer_used_bytes=0, closed_connections_error=1)
    assert "a fault" in caplog.text


def test_a_slow_tier_holds_up_only_those_who_ask_it(
    client: Client, backend: DictTier, serving: Serving
) -> None:
    backend.open.clear()
    client.send(header(EXIST) + header(HEALTH))
    with serving.client() as other:
        assert other.healthy()
    backend.open.set()
    assert client.receive(72) == FAILED + SUCCEEDED


@pytest.mark.parametrize("how", ["writers", "readers"])
def test_slow_clients_that_hold_all_room_lose_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 2.0)
    payload = bytes(16 * MIB)
    with (
        Serving(DictTier(), buffer_bytes=64 * MIB) as serving,
        serving.client() as good,
        serving.clients(4) as slow,
    ):
        good.put(KEY, payload)
        assert good.exists(KEY)
        for number, client in enumerate(slow):
            if how == "readers":
                client.send(header(GET, KEY))
            else:
                client.send(put(key(number), payload)[:1000])
        serving.until(buffer_used_bytes=64 * MIB)
        good.put(key(9), payload)
        assert good.get(key(9)) == payload
        assert 1 <= serving.stats()["closed_connections_stalled"] <= 4


def test_a_list_is_not_cut_short(backend: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LIST_TIMEOUT_S", 0.2)
    with Serving(backend, memory_bytes=MIB) as serving, serving.client() as client:
        client.put(KEY, b"x")
        assert client.list() == {KEY}
        backend.open.clear()
        client.send(header(LIST))
        assert client.receive(36) == FAILED
        backend.open.set()
        assert client.list() == {KEY}
