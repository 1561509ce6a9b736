# SPDX-License-Identifier: Apache-2.0
"""The agent and the library's backends read and write the same chunks, on disk and in Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lmcache_redis.cache.disk.format import PAGE_BYTES, parse_page
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk
from tests.agent.test_disk import CHUNKS, HASHES, agent_with_disk, check_hit, files, store_and_wait
from tests.harness import AgentServer, Engine
from tests.servers import RedisServer, stripe_keys

SLOT_BYTES = 64 << 10  # the harness's agents'
LIMIT_BYTES = 64 << 20


def get(tier: ChunkBackend, key: ObjectKey) -> tuple[RemoteMetadata, bytes]:
    buffers: list[bytearray] = []

    def allocate(metadata: RemoteMetadata) -> Sequence[memoryview]:
        buffers.append(bytearray(metadata.length))
        return [memoryview(buffers[0])]

    metadata = tier.get_bytes(key, allocate)
    assert metadata is not None
    return metadata, bytes(buffers[0])


def layout_of(agent: AgentServer) -> bytes:
    return bytes.fromhex(agent.status()["engines"][0]["layout"])


def test_what_an_agent_stored_is_read_by_the_tiers(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        store_and_wait(agent, engine)
        layout = layout_of(agent)
        chunk_bytes = agent.status()["engines"][0]["chunk_bytes"]
        agent.terminate()
    disk = ChunkBackend([on_disk(tmp_path / "disk", LIMIT_BYTES, layout=layout)])
    redis = ChunkBackend([in_redis(redis_server.unix_url, layout=layout)])
    own = ChunkBackend([in_redis(redis_server.unix_url)])
    try:
        keys = redis.stored_keys()
        assert len(keys) == CHUNKS
        assert {key.model_name for key in keys} == {"test/model"}
        assert {key.chunk_hash for key in keys} == {*HASHES[3::4]}
        assert set(disk.stored_keys()) == set(keys)
        # Three layers, four blocks of 16 tokens, K and V, 64 elements a token.
        shape = (3, 4, 2, 16, 64)
        pages = RemoteMetadata(chunk_bytes, [shape], ["float32"], MemoryFormat.PAGES)
        for key in keys:
            metadata, payload = get(redis, key)
            assert metadata == pages
            assert get(disk, key) == (pages, payload)
        for key, tensor in zip(keys, redis.batched_get(keys), strict=True):
            assert tensor is not None
            first = HASHES.index(key.chunk_hash) - 3
            layers = [layer[first : first + 4] for layer in engine.caches[0].values()]
            assert torch.equal(tensor, torch.stack(layers))
        # Without the layout the backend's chunks are its own tensors, under other names.
        assert own.stored_keys() == []
        assert not own.contains(keys[0])
        assert own.get(keys[0]) is None
    finally:
        for tier in (disk, redis, own):
            tier.close()
    with contextlib.closing(ChunkBackend([on_disk(tmp_path / "disk", LIMIT_BYTES)])) as tensors:
        assert tensors.stored_keys() == []
        assert tensors.get(keys[0]) is None


def chunks_of(
    tmp_path: Path, redis: RedisServer, agent: AgentServer, engine: Engine
) -> tuple[bytes, dict[ObjectKey, tuple[RemoteMetadata, bytes]]]:
    """The layout and the chunks that an agent stored. The agent has ended; no pool has them."""
    store_and_wait(agent, engine)
    layout = layout_of(agent)
    agent.terminate()
    reader = ChunkBackend([in_redis(redis.unix_url, layout=layout)])
    chunks = {key: get(reader, key) for key in reader.stored_keys()}
    reader.close()
    redis.command("FLUSHALL")
    disk = ChunkBackend([on_disk(tmp_path / "disk", LIMIT_BYTES, layout=layout)])
    assert all(disk.remove(key) for key in disk.stored_keys())
    disk.close()
    assert len(chunks) == CHUNKS
    return layout, chunks


@pytest.mark.parametrize("tier", ["redis", "disk"])
def test_what_the_library_has_put_is_a_hit_of_the_agent(
    tmp_path: Path, redis_server: RedisServer, tier: str
) -> None:
    """Into Redis through memory, as the agent has its host pool."""
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        layout, chunks = chunks_of(tmp_path, redis_server, agent, engine)
        if tier == "disk":
            tiers = [on_disk(tmp_path / "disk", LIMIT_BYTES, layout=layout)]
        else:
            redis = in_redis(redis_server.unix_url, layout=layout, slot_bytes=SLOT_BYTES)
            tiers = [in_memory(LIMIT_BYTES), redis]
        with contextlib.closing(ChunkBackend(tiers)) as backend:
            for key, (metadata, payload) in chunks.items():
                assert backend.put_bytes(key, metadata, [memoryview(payload)])
        agent.start()
        engine.wait_ready()
        check_hit(engine)
        assert agent.counter(f"hit_chunks_{tier}") == CHUNKS


def names_on_disk(directory: Path) -> set[bytes]:
    """The chunk keys in the first pages of all files."""
    return {parse_page(path.read_bytes()[:PAGE_BYTES])[0] for path in files(directory)}


def names_in_redis(redis: RedisServer) -> set[bytes]:
    """The keys of all stripes, without their index."""
    return {name[:-2] for name in stripe_keys(redis)}


def test_a_chunk_has_one_name_in_redis_and_on_disk(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The same if an agent with a key prefix or the library's backends write it."""
    with (
        agent_with_disk(tmp_path, redis_server, key_prefix="site:") as agent,
        Engine(agent.endpoint) as engine,
    ):
        store_and_wait(agent, engine)
        layout = layout_of(agent)
        agent.terminate()
    names = names_on_disk(tmp_path / "disk")
    assert len(names) == CHUNKS
    assert all(name.startswith(b"site:lmcr2:" + layout.hex()[:16].encode()) for name in names)
    assert names == names_in_redis(redis_server)
    with contextlib.closing(
        ChunkBackend([on_disk(tmp_path / "disk", LIMIT_BYTES, layout=layout, key_prefix=b"site:")])
    ) as disk:
        assert {key.chunk_hash for key in disk.stored_keys()} == {*HASHES[3::4]}

    redis_server.command("FLUSHALL")
    key = ObjectKey(b"hash", "org/model", 7)
    metadata = RemoteMetadata(8, [(8,)], ["uint8"], MemoryFormat.UNDEFINED)
    remote = ChunkBackend([in_redis(redis_server.unix_url)])
    disk = ChunkBackend([on_disk(tmp_path / "tensors", LIMIT_BYTES)])
    with contextlib.closing(remote), contextlib.closing(disk):
        for tier in (remote, disk):
            assert tier.put_bytes(key, metadata, [memoryview(b"12345678")])
    assert names_on_disk(tmp_path / "tensors") == names_in_redis(redis_server)
