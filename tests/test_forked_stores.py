# SPDX-License-Identifier: Apache-2.0
"""What was made before a fork: the library's objects in a child process, and in its parent."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_redis import AsyncKVStore, KVStore
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.objects import ChunkBackend, in_redis
from lmcache_redis.resp import RedisOptions, RedisPlane
from tests.harness import WAIT_S
from tests.servers import RedisServer

pytestmark = [
    pytest.mark.servers,
    # Python warns of what is tested here.
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]

_KEY = ObjectKey(b"\x01" * 32, "m", ObjectKey.ComputeKVRank(1, 0, 1, 0))


def in_a_fork(call: Callable[[], Any]) -> Any:
    """What the call returns, or raises, in a child process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            theirs.send(call())
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=run)
    process.start()
    try:
        assert ours.poll(WAIT_S), "no answer of the child"
        return ours.recv()
    finally:
        process.join(WAIT_S)
        process.kill()
        ours.close()
        theirs.close()


@pytest.fixture(params=[0, 1 << 20], ids=["redis", "memory"])
def store(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[KVStore]:
    with KVStore(server.url, "model", memory_bytes=request.param) as store:
        assert store.put_bytes("a", b"of the parent")
        yield store


def test_a_child_opens_a_store_anew(store: KVStore) -> None:
    def use() -> tuple[bytes | None, bool, str]:
        found = store.get_bytes("a"), store.put_bytes("b", b"of the child"), store.why_down
        store.close()
        return found

    assert in_a_fork(use) == (b"of the parent", True, "")
    assert store.get_bytes("b") == b"of the child"


def test_the_parent_is_unharmed_in_the_middle_of_its_calls(store: KVStore) -> None:
    stop, problems = threading.Event(), []

    def load() -> None:
        for number in itertools.count():
            if stop.is_set():
                break
            data = number.to_bytes(8, "big") * 10_000
            if not (store.put_bytes("c", data) and store.get_bytes("c") == data):
                problems.append(number)

    lost = store._backend._tiers[0].stats().connections_lost  # type: ignore[attr-defined]
    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(5):
            assert in_a_fork(lambda: store.get_bytes("a")) == b"of the parent"
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert problems == []
    assert store._backend._tiers[0].stats().connections_lost == lost  # type: ignore[attr-defined]


def test_a_closed_store_stays_closed(server: RedisServer) -> None:
    store = KVStore(server.url)
    store.close()
    assert "Closed: the store is closed" in in_a_fork(lambda: store.get("a"))


def test_asyncio(server: RedisServer) -> None:
    async def main() -> bytes | None:
        found: bytes | None = await store.get_bytes("a")
        await store.close()
        return found

    store = AsyncKVStore(server.url, "model")
    assert asyncio.run(store.put_bytes("a", b"of the parent"))
    assert in_a_fork(lambda: asyncio.run(main())) == b"of the parent"
    assert asyncio.run(main()) == b"of the parent"


def test_backends_and_planes_say_what_to_do_at_once(server: RedisServer) -> None:
    backend, plane = ChunkBackend([in_redis(server.url)]), RedisPlane(RedisOptions(server.url))
    plane.start()
    plane.wait_probed(WAIT_S)
    try:
        for call in (
            lambda: backend.get(_KEY),
            lambda: backend.put(_KEY, torch.ones(3)),
            lambda: backend.contains(_KEY),
            lambda: backend.remove(_KEY),
            lambda: backend.stored_keys(),
            lambda: backend.flush(1.0),
            lambda: plane.exists((b"k",), time.monotonic() + 1.0, print),
            lambda: plane.load_all((), print),
            plane.stats,
        ):
            said = in_a_fork(call)
            assert said.startswith("RuntimeError: the ")
            assert said.endswith("make one in each process")
        assert in_a_fork(lambda: (backend.close(), plane.close(1.0))) == (None, True)
        assert backend.put(_KEY, torch.ones(3))
    finally:
        backend.close()
        plane.close(1.0)
