# SPDX-License-Identifier: Apache-2.0
"""The blocking library without a server binary, and without its server at last."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("torch")

from lmcache_redis.errors import NotListed
from lmcache_redis.objects import ChunkBackend, in_redis
from tests.fake.server import FakeRedisServer
from tests.objects.samples import key_of, same, tensor_of


def test_chunks_outlive_the_backend(fake: FakeRedisServer) -> None:
    shapes = [(1,), (2, 300, 7), (3_000_000,)]
    chunks = {key_of(n): tensor_of(n, shape) for n, shape in enumerate(shapes)}
    with contextlib.closing(ChunkBackend([in_redis(fake.url)])) as one:
        assert one.put(key_of(7), tensor_of(7, (9,)))
        assert all(one.put(key, chunk, blocking=False) for key, chunk in chunks.items())
        assert one.flush(30)
        assert one.remove(key_of(7))
    with contextlib.closing(ChunkBackend([in_redis(fake.url)])) as other:
        assert set(other.stored_keys()) == set(chunks)
        assert not other.contains(key_of(7))
        *found, missing = other.batched_get([*chunks, key_of(99)])
        assert all(map(same, found, chunks.values()))
        assert missing is None
        fake.stop()
        assert other.get(key_of(1)) is None
        assert not other.put(key_of(2), tensor_of(2, (100,)))
        with pytest.raises(NotListed):
            other.stored_keys()
