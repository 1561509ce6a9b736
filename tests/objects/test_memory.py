# SPDX-License-Identifier: Apache-2.0
"""Memory: its limit and LRU order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.objects import ChunkBackend, in_memory
from tests.objects.samples import Buffers, fill, held, key_of, metadata_of, same, tensor_of


@pytest.fixture
def small() -> Iterator[ChunkBackend]:
    """A backend with room for ten chunks of 100 bytes."""
    backend = ChunkBackend([in_memory(1000)])
    yield backend
    backend.close()


def used_bytes(backend: ChunkBackend) -> int:
    return backend._objects.cache.pool.idle


def test_the_least_recently_used_goes_first(small: ChunkBackend) -> None:
    fill(small, range(10))
    assert used_bytes(small) == 1000
    assert same(small.get(key_of(0)), tensor_of(0, (100,)))  # touches
    assert small.contains(key_of(1))  # does not
    fill(small, range(2, 3))  # counts as a use, and takes no more room
    assert held(small) == list(range(10))
    fill(small, range(10, 12))
    assert held(small) == [0, 2, *range(4, 12)]
    assert used_bytes(small) <= 1000


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


def test_a_chunk_over_the_limit_is_not_stored(small: ChunkBackend) -> None:
    fill(small, range(10))
    for blocking in (True, False):
        assert not small.put(key_of(0), tensor_of(20, (1001,)), blocking)
        assert not small.put(key_of(20), tensor_of(20, (1001,)), blocking)
    assert held(small) == list(range(10))
    assert small.put(key_of(0), tensor_of(20, (1000,)))
    assert held(small) == [0]


@pytest.mark.parametrize("change", ["evict the others", "replace", "remove", "close"])
def test_a_chunk_that_is_read_stays_whole(change: str) -> None:
    """At a size whose memory is reused."""
    backend = ChunkBackend([in_memory(1_000_000)])
    chunk = tensor_of(3, (100_000,))
    assert backend.put(key_of(3), chunk)
    buffers = Buffers()

    def while_it_is_read(metadata: RemoteMetadata) -> list[memoryview]:
        if change == "remove":
            assert backend.remove(key_of(3))
        for number in range(20, 40):
            key = 3 if change == "replace" else number
            assert backend.put(key_of(key), tensor_of(number, (100_000,)))
        assert len(held(backend)) == {"replace": 1, "remove": 10}.get(change, 11)
        if change == "close":
            backend.close()
        return buffers(metadata)

    assert backend.get_bytes(key_of(3), while_it_is_read) is not None
    assert buffers.data == bytes(chunk.numpy())
    if change == "evict the others":
        assert held(backend) == [3, *range(31, 40)], "the last one read is the last to go"
    assert used_bytes(backend) <= 1_000_000
    backend.close()


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
