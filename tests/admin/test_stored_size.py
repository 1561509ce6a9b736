# SPDX-License-Identifier: Apache-2.0
"""What a part takes of a real server's memory is what `size` says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lmcache_redis.admin.sizes.sizing import EXPECTED_RATIO, stored_part
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import describe_header
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames, stripe_key
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from tests.servers import RedisServer

MODEL = "meta-llama/Llama-3.1-8B"
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.servers
@pytest.mark.parametrize("ratio", [1.0, min(EXPECTED_RATIO.values()), max(EXPECTED_RATIO.values())])
@pytest.mark.parametrize("part_bytes", [700 * KIB, MIB, 4 * MIB, 4_590_000, 32 * MIB])
def test_the_memory_of_a_part(
    redis_server: RedisServer, client: Any, part_bytes: int, ratio: float
) -> None:
    """Written as an agent writes it: the same frames, under the same keys."""
    expected = stored_part(part_bytes, DEFAULT_SLOT_BYTES, MODEL, ratio)
    names = ChunkNames(bytes(32))
    key = ObjectKey(bytes(32), MODEL, 0)
    metadata = RemoteMetadata(part_bytes, [(part_bytes,)], ["uint8"], MemoryFormat.PAGES)
    frame = names.frame(key, metadata, stripe_payload_bytes(part_bytes, DEFAULT_SLOT_BYTES))
    before = used_bytes(redis_server, client)
    keys = [stripe_key(names.chunk_key(key), index) for index in range(frame.stripe_count)]
    for index, each in enumerate(keys):
        header = frame.header(index, bytes(16), 0, 0)
        payload = bytes(math.ceil(describe_header(header).payload_bytes / ratio))
        client.set(each, bytes(header) + payload)
    assert len(keys) == expected.stripes
    assert sum(client.strlen(each) for each in keys) == expected.value_bytes
    told = sum(client.memory_usage(each) for each in keys)
    assert expected.memory_bytes == pytest.approx(told, rel=0.01)
    used = used_bytes(redis_server, client) - before
    assert expected.memory_bytes == pytest.approx(used, rel=0.02, abs=128 * KIB)


def used_bytes(server: RedisServer, client: Any) -> int:
    """Without what the server holds for the connection that wrote."""
    client.connection_pool.disconnect()
    with server.client() as other:
        return int(other.info("memory")["used_memory"])


@pytest.mark.parametrize(
    ("part_mib", "most"), [(1, 1.07), (1.5, 1.09), (2, 1.04), (14, 1.02), (32, 1.01)]
)
def test_little_is_lost_to_the_allocator(part_mib: float, most: float) -> None:
    """Equal stripes took 1.25, 1.17, 1.13, 1.07 and 1.03 times the part."""
    part = stored_part(int(part_mib * MIB), DEFAULT_SLOT_BYTES, MODEL)
    assert part.memory_bytes < most * part.part_bytes
