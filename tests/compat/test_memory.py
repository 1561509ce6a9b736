# SPDX-License-Identifier: Apache-2.0
"""The library and the gateway free what they make without the garbage collector."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_redis.errors import FormatError
from lmcache_redis.kvstore import KVStore
from lmcache_redis.objects import in_memory
from lmcache_redis.objects.backend import CacheThread, _result
from tests.compat.gateway.serving import Serving
from tests.compat.gateway.wire import EXIST, GET, HEALTH, LIST, SUCCESS, Client, header, put
from tests.cycles import left_by
from tests.servers import RedisServer, wait_until

TIMES = 1000


@pytest.fixture
def store(shared_server: RedisServer) -> Iterator[KVStore]:
    with KVStore(shared_server.unix_url, memory_bytes=1 << 20, deadline_s=5.0) as store:
        yield store


def settled(store: KVStore) -> Callable[[], object]:
    thread = store._backend._thread
    cache = thread.objects.cache
    return lambda: wait_until(lambda: not (thread.calls or cache.backlog), "an idle store")


def test_calls_of_a_store(store: KVStore) -> None:
    tensor = torch.zeros(100)

    def use(number: int) -> None:
        name = f"n{number % 10}"
        store.put(name, tensor)
        store.get(name)
        store.get("none")
        store.exists(name)
        store.delete(name)
        store.put_bytes("bytes", b"12345")
        with contextlib.suppress(ValueError):
            store.get_into("bytes", bytearray(2))
        for wrong in ("bytes", ""):
            with contextlib.suppress(FormatError):
                store.get(wrong)
        if not number % 10:
            store.put_many({"a": tensor, "b": tensor})
            next(store.get_many(["a", "b"]))  # and no further
            store.names()

    assert left_by(use, TIMES // 4, settled(store)) == []


def test_a_store_without_its_server(own_server: RedisServer) -> None:
    tensor = torch.zeros(100)
    with KVStore(own_server.unix_url, deadline_s=0.1) as store:
        assert store.put("a", tensor)
        own_server.stop()

        def use(number: int) -> None:
            store.put(f"n{number}", tensor)
            store.get(f"n{number}")

        assert left_by(use, TIMES // 4, settled(store)) == []
        own_server.cont()


def test_calls_that_raise() -> None:
    thread = CacheThread([in_memory(1 << 20)])

    def refuse(done: Any) -> None:
        raise FormatError("no chunk")

    def fail(done: Any) -> None:
        raise ValueError("a bug")

    def use(number: int) -> None:
        for call in (refuse, fail):
            with contextlib.suppress(FormatError, ValueError):
                _result(thread.call(call), 1e9, None)

    assert left_by(use, TIMES, lambda: None) == []
    thread.close(1.0)


def test_requests_and_connections_of_a_gateway(shared_server: RedisServer) -> None:
    with (
        Serving(None, redis_url=shared_server.unix_url, disk_path=None) as serving,
        serving.client() as client,
    ):
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(key: str) -> None:
            client.send(put(key, bytes(1000)))
            for command in (GET, EXIST, LIST, HEALTH):
                client.send(header(command, key))
                code, nbytes, *_ = client.reply()
                if code == SUCCESS and command in (GET, LIST):
                    client.receive(nbytes)

        opened: list[int] = []

        def use(number: int) -> None:
            key = f"org/model@4@3@{number % 10:010x}@bfloat16"
            ask(key)
            ask("no key")
            for wrong in (header(HEALTH), b"123", header(99), header(GET, key)):
                with serving.client() as other:
                    other.send(wrong)
            with serving.client() as other:
                reset(other)
            opened.extend(range(5))

        def settle() -> None:
            serving.until(connections=1 + len(opened), open_connections=1, buffer_used_bytes=0)

        assert left_by(use, 100, settle) == []


def reset(client: Client) -> None:
    """Closes the connection in the middle of a PUT, as a process that is killed may."""
    client.send(put("org/model@4@3@0@bfloat16", bytes(1000))[:200])
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
