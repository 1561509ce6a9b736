# SPDX-License-Identifier: Apache-2.0
"""Memory: its limit and LRU order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.objects import ChunkBackend, in_memory
from tests.objects.samples import fill, held, key_of, metadata_of, tensor_of


@pytest.fixture
def small() -> Iterator[ChunkBackend]:
    """A backend with room for ten chunks of 100 bytes."""
    backend = ChunkBackend([in_memory(1000)])
    yield backend
    backend.close()


def used_bytes(backend: ChunkBackend) -> int:
    return backend._objects.cache.pool.idle


def test_close_frees_all_memory() -> None:
    backend = ChunkBackend([in_memory(1_000_000)])
    memory = backend._thread._memory
    for _ in range(2):
        assert backend.put(key_of(1), tensor_of(1, (100_000,)))
    assert memory.spare_bytes == 100_000, "of the chunk that was replaced"
    backend.close()
    assert memory.spare_bytes == 0


def test_a_large_chunk_takes_the_place_of_several(small: ChunkBackend) -> None:
    fill(small, range(10))
    assert small.put(key_of(20), tensor_of(20, (950,)))
    assert held(small) == [20]
    assert used_bytes(small) == 950


def test_a_put_that_fails_leaves_nothing(small: ChunkBackend) -> None:
    """An error of the caller's buffers, after memory was reserved for them."""
    fill(small, range(1))
    payload = memoryview(bytearray(100))
    for _ in range(3):
        with pytest.raises(FormatError):
            small.put_bytes(key_of(1), metadata_of(101), [payload])
    assert held(small) == [0]
    assert small._objects.cache.pool.pinned == 0


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_is_positive(limit_bytes: int) -> None:
    with pytest.raises(ConfigError, match="limit_bytes"):
        in_memory(limit_bytes)
