# SPDX-License-Identifier: Apache-2.0
"""LMCache's storage backends: its calls as documented, over real backends.

`tests/objects` has what a `ChunkBackend` promises, which each of them is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_redis.compat.storage_backend import (
    CacheEngineKey,
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
    LMCBackendInterface,
    LMCHybridBackend,
    LMCLocalBackend,
    LMCLocalDiskBackend,
    LMCPipelinedRemoteBackend,
    LMCRemoteBackend,
)
from lmcache_redis.errors import ConfigError
from tests.objects.samples import FLUSH_S, same, tensor_of
from tests.servers import RedisServer
from tests.topologies import running_sentinel

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"
)

# Layers, key and value, tokens, heads, head size.
KV_SHAPE = (4, 2, 16, 2, 8)
METADATA = LMCacheEngineMetadata("org/model", 1, 0, "vllm", torch.bfloat16)
POOL = LMCacheMemPoolMetadata(KV_SHAPE, torch.bfloat16, 1)
KINDS: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
    "local": (LMCLocalBackend, (POOL,)),
    "disk": (LMCLocalDiskBackend, (POOL,)),
    "remote": (LMCRemoteBackend, (METADATA,)),
    "pipelined": (LMCPipelinedRemoteBackend, (METADATA,)),
    "hybrid": (LMCHybridBackend, (METADATA, POOL)),
}

MakeFacade = Callable[..., Any]


def engine_key(number: int) -> CacheEngineKey:
    return CacheEngineKey("vllm", "org/model", 1, 0, f"{number:064x}")


def chunk_of(number: int) -> torch.Tensor:
    return tensor_of(number, KV_SHAPE, "bfloat16")


def made(kind: str, dst_device: str = "cpu", **changes: Any) -> Any:
    """A backend of a kind. changes: to its settings."""
    settings: dict[str, Any] = {"local_device": "cpu", "max_local_cache_size": 0.25}
    backend, described = KINDS[kind]
    return backend(LMCacheEngineConfig.from_defaults(**settings | changes), *described, dst_device)


@pytest.fixture
def make(server: RedisServer, tmp_path: Path) -> MakeFacade:
    """Backends of a kind over an empty server and a directory; they close by themselves."""

    def make_one(kind: str, **changes: Any) -> Any:
        if kind == "disk":
            changes["local_device"] = f"file://{tmp_path}/chunks/"
        return made(kind, **{"remote_url": server.url, **changes})

    return make_one


# ------------------------------------------------------------------ as documented


@pytest.mark.parametrize("kind", ["hybrid", "local", "disk", "pipelined", "remote"])
def test_every_documented_call(make: MakeFacade, kind: str) -> None:
    """In the order of LMCache's page: the calls of the interface, then those of each class."""
    backend = make(kind)
    keys = [engine_key(number) for number in range(4)]
    chunks = [chunk_of(number) for number in range(4)]
    assert list(backend.batched_get(keys=iter(keys))) == [None] * 4
    assert backend.batched_put(keys_and_chunks=zip(keys, chunks, strict=True)) == 4
    found = list(backend.batched_get(keys=keys))
    assert all(map(same, found, chunks))
    assert backend.contains(key=keys[0]) is True
    assert backend.contains(key=engine_key(9)) is False
    assert same(backend.get(key=keys[0]), chunks[0])
    assert backend.get(key=engine_key(9)) is None
    name = "value" if kind == "hybrid" else "kv_chunk"
    assert backend.put(**{"key": engine_key(4), name: chunk_of(4), "blocking": True})
    assert same(backend.get(engine_key(4)), chunk_of(4))
    backend.put(engine_key(5), chunk_of(5), False)
    assert backend.batched_put([(engine_key(6), chunk_of(6))], blocking=False) == 1
    if kind != "hybrid":
        assert backend.put_blocking(key=engine_key(7), kv_chunk=chunk_of(7)) is None
        assert same(backend.get(engine_key(7)), chunk_of(7))
    if kind in ("local", "disk"):
        assert backend.put_nonblocking(key=engine_key(8), kv_chunk=chunk_of(8)) is None
        assert backend.remove(key=keys[0])
        assert not backend.contains(keys[0])
        assert not backend.remove(keys[0])
    if kind in ("pipelined", "remote"):
        assert {*keys} <= {*backend.list()}
    assert backend.flush(FLUSH_S)
    assert same(backend.get(engine_key(5)), chunk_of(5))
    assert same(backend.get(engine_key(6)), chunk_of(6))
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.get(keys[0])


def test_a_backend_of_ones_own() -> None:
    """LMCBackendInterface is a base class: four calls make a backend."""

    class InADictionary(LMCBackendInterface):
        def __init__(self) -> None:
            super().__init__(dst_device="cpu")
            self.chunks: dict[Any, torch.Tensor] = {}

        def put(self, key: Any, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
            self.chunks[key] = kv_chunk

        def get(self, key: Any) -> torch.Tensor | None:
            return self.chunks.get(key)

        def contains(self, key: Any) -> bool:
            return key in self.chunks

        def close(self) -> None:
            self.chunks.clear()

    backend = InADictionary()
    assert backend.batched_put([(engine_key(1), chunk_of(1)), (engine_key(2), chunk_of(2))]) == 2
    found = list(backend.batched_get([engine_key(2), engine_key(3)]))
    assert same(found[0], chunk_of(2))
    assert found[1] is None
    with pytest.raises(TypeError, match="abstract"):
        LMCBackendInterface()  # type: ignore[abstract]


@pytest.mark.parametrize("smaller", ["config", "pool"])
def test_the_smaller_limit_holds(smaller: str) -> None:
    """Settings are any objects with the attributes."""
    room_gib = 3.5 * chunk_of(0).nbytes / (1 << 30)
    limits = {"config": 1.0, "pool": 1.0, smaller: room_gib}
    config: Any = SimpleNamespace(local_device="cuda", max_local_cache_size=limits["config"])
    pool: Any = SimpleNamespace(max_local_cache_size=limits["pool"])
    backend = LMCLocalBackend(config, pool, "cpu")
    backend.batched_put((engine_key(number), chunk_of(number)) for number in range(10))
    assert len(backend.list()) == 3
    backend.close()


def test_a_directory_is_found_again(tmp_path: Path) -> None:
    first = made("disk", local_device=str(tmp_path / "chunks"))
    first.put(engine_key(1), chunk_of(1))
    first.close()
    again = made("disk", local_device=f"file://{tmp_path}/chunks/")
    assert same(again.get(engine_key(1)), chunk_of(1))
    again.close()


# ------------------------------------------------------------------ the end of a backend


def test_an_iterator_keeps_its_backend_open(make: MakeFacade) -> None:
    before = {*threading.enumerate()}
    make("remote").put(engine_key(1), chunk_of(1))
    found = [*make("hybrid").batched_get(engine_key(1) for _ in range(40))]
    assert len(found) == 40
    assert all(same(each, chunk_of(1)) for each in found)
    left = {*threading.enumerate()} - before
    assert not [each for each in left if each.name == "lmcr-cache"]


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("local", {"local_device": "file:///data/kv/"}, "a directory is for LMCLocalDiskBackend"),
        ("local", {"local_device": None}, 'local_device is None: set it to "cpu"'),
        ("local", {"max_local_cache_size": 0}, "max_local_cache_size is 0"),
        ("local", {"max_local_cache_size": "5"}, "max_local_cache_size is '5'"),
        ("local", {"max_local_cache_size": float("nan")}, "max_local_cache_size is nan"),
        ("disk", {"local_device": "cpu"}, "local_device is 'cpu': set it to a directory"),
        ("disk", {"local_device": None}, "local_device is None: set it to a directory"),
        ("disk", {"local_device": "file://"}, "local_device is 'file://': set it to a directory"),
        ("remote", {"remote_url": None}, "remote_url is None: set it to redis://HOST:PORT"),
        ("remote", {"remote_url": "lm://localhost:65432"}, "must begin with redis://"),
        ("remote", {"remote_url": "redis-sentinel://"}, "empty host: write HOST:PORT,HOST:PORT"),
        ("remote", {"remote_url": "redis-sentinel://h:1/m"}, "database in the Redis URL"),
        (
            "remote",
            {"remote_serde": "cachegen"},
            "'cachegen'.*never quantized, and LMCACHE_REDIS_COMPRESS=lossless",
        ),
        ("pipelined", {"remote_serde": "kivi"}, "remote_serde is 'kivi'"),
        ("hybrid", {"local_device": "/data/kv"}, "a directory is for LMCLocalDiskBackend"),
        ("hybrid", {"remote_url": "lm://localhost:65432"}, "must begin with redis://"),
    ],
)
def test_settings_that_cannot_be_honoured(kind: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        made(kind, **changes)


def test_the_environment_names_the_seal_keys(
    make: MakeFacade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("11" * 32)
    path.chmod(0o600)
    monkeypatch.setenv("LMCACHE_REDIS_SEAL_KEY_FILE", str(path))
    sealing = make("remote")
    sealing.put(engine_key(1), chunk_of(1))
    assert same(sealing.get(engine_key(1)), chunk_of(1))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        make("remote")
    monkeypatch.delenv("LMCACHE_REDIS_SEAL_KEY_FILE")
    assert make("remote").get(engine_key(1)) is None


def test_the_environment_says_whether_to_pack(
    make: MakeFacade, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = torch.randn(2, 2, 256, 8, 64).to(torch.bfloat16)
    monkeypatch.setenv("LMCACHE_REDIS_COMPRESS", "lossless")
    make("remote").put(engine_key(1), chunk)
    with server.client() as client:
        stored_bytes = sum(client.strlen(key) - 640 for key in client.scan_iter(count=1000))
    assert stored_bytes < 0.78 * chunk.nbytes
    monkeypatch.setenv("LMCACHE_REDIS_COMPRESS", "zstd")
    with pytest.raises(ConfigError, match="choose one of off, lossless"):
        make("remote")
    monkeypatch.delenv("LMCACHE_REDIS_COMPRESS")
    assert torch.equal(make("remote").get(engine_key(1)), chunk)


@pytest.mark.servers
def test_lmcaches_url_of_sentinels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_sentinel(tmp_path) as watched:
        url = f"redis-sentinel://127.0.0.1:{watched.port}"
        backend = made("remote", remote_url=url)
        assert backend.batched_put([(engine_key(1), chunk_of(1))]) == 1
        assert same(backend.get(engine_key(1)), chunk_of(1))
        backend.close()
        monkeypatch.setenv("REDIS_SERVICE_NAME", "another")
        other = made("remote", remote_url=url)
        assert other.batched_put([(engine_key(1), chunk_of(1))]) == 0
        other.close()


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize("dst_device", ["meta", "mps", "gpu", "cuda:x", 3.5, None])
def test_devices_that_no_chunk_can_be_on(dst_device: Any) -> None:
    with pytest.raises(ConfigError, match="dst_device is"):
        made("local", dst_device)


def test_devices_that_a_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check alone: nothing is copied to a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert LMCLocalBackend(LMCacheEngineConfig(), POOL).dst_device == "cuda"
    assert made("local", "cuda:0").dst_device == "cuda:0"
    with pytest.raises(ConfigError, match="'cuda:1', and this machine has 1 CUDA devices"):
        made("local", "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for dst_device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match='has 0 CUDA devices: set it to "cpu"'):
            made("local", dst_device)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dst_device", ["cuda", "cuda:0", "cpu"])
def test_chunks_of_a_gpu(make: MakeFacade, dst_device: str) -> None:
    backend = make("hybrid", dst_device=dst_device)
    chunks = [chunk_of(number).cuda() for number in range(6)]
    keys = [engine_key(number) for number in range(6)]
    for number in (0, 1):
        backend.put(keys[number], chunks[number], blocking=number == 0)
    assert backend.batched_put(zip(keys[2:], chunks[2:], strict=True)) == 4
    expected = [chunk.cpu() for chunk in chunks]
    for chunk in chunks:
        chunk.zero_()
    assert backend.flush(FLUSH_S)
    for found in ([backend.get(key) for key in keys], list(backend.batched_get(keys))):
        assert {tensor.device.type for tensor in found} == {dst_device[:4].rstrip(":")}
        assert all(same(tensor.cpu(), each) for tensor, each in zip(found, expected, strict=True))
    backend.close()
