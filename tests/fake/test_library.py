# SPDX-License-Identifier: Apache-2.0
"""The blocking library without a server binary."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from lmcache_redis.errors import NotListed
from lmcache_redis.objects import ChunkBackend, in_redis
from tests.fake.server import FakeRedisServer
from tests.objects.samples import Buffers, key_of, metadata_of, same, tensor_of


def test_chunks_outlive_the_backend(fake: FakeRedisServer) -> None:
    shapes = [(1,), (2, 300, 7), (3_000_000,)]
    chunks = {key_of(n): tensor_of(n, shape) for n, shape in enumerate(shapes)}
    one = ChunkBackend([in_redis(fake.url)])
    assert all(one.put(key, chunk) for key, chunk in chunks.items())
    one.close()
    other = ChunkBackend([in_redis(fake.url)])
    try:
        assert set(other.stored_keys()) == set(chunks)
        for key, chunk in chunks.items():
            assert other.contains(key)
            assert same(other.get(key), chunk)
        *found, missing = other.batched_get([*chunks, key_of(99)])
        assert all(map(same, found, chunks.values()))
        assert missing is None
    finally:
        other.close()


def test_queued_puts_and_removals(fake: FakeRedisServer) -> None:
    backend = ChunkBackend([in_redis(fake.url)])
    try:
        payload = bytes(range(256)) * 40
        metadata = metadata_of(len(payload))
        for number in range(3):
            assert backend.put_bytes(key_of(number), metadata, [memoryview(payload)], False)
        assert backend.flush(30)
        buffers = Buffers(5000, 5240)
        assert backend.get_bytes(key_of(1), buffers) == metadata
        assert buffers.data == payload
        assert backend.remove(key_of(1))
        assert not backend.contains(key_of(1))
        assert backend.get_bytes(key_of(1), Buffers()) is None
        assert set(backend.stored_keys()) == {key_of(0), key_of(2)}
    finally:
        backend.close()
    assert fake.command("DBSIZE") == 2


def test_without_its_server_everything_is_a_miss(fake: FakeRedisServer) -> None:
    backend = ChunkBackend([in_redis(fake.url)])
    try:
        assert backend.put(key_of(1), tensor_of(1, (100,)))
        fake.stop()
        assert backend.get(key_of(1)) is None
        assert not backend.put(key_of(2), tensor_of(2, (100,)))
        with pytest.raises(NotListed):
            backend.stored_keys()
    finally:
        backend.close()
