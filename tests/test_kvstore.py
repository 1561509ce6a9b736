# SPDX-License-Identifier: Apache-2.0
"""`KVStore` and `AsyncKVStore` with real servers, and the examples as a reader runs them."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmcache_redis
from lmcache_redis import AsyncKVStore, KVStore
from lmcache_redis.errors import Closed, ConfigError, FormatError, NotListed
from lmcache_redis.resp import RedisOptions
from tests.harness import wait_until
from tests.resp.odd import ENVOY, OddProxy
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(params=[0, 1 << 20], ids=["redis", "memory"])
def store(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[KVStore]:
    with KVStore(server.url, "model", memory_bytes=request.param) as store:
        yield store


def test_a_tensor_comes_back_as_it_was(store: KVStore) -> None:
    tensor = torch.rand(2, 3, 5).to(torch.bfloat16)
    assert store.get("a") is None
    assert store.put("a", tensor.transpose(0, 1))
    found = store.get("a")
    assert found is not None
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, tensor.transpose(0, 1))
    assert store.put("a", tensor)
    assert store.names() == ["a"]
    assert store.delete("a")
    assert not store.exists("a")
    assert not store.delete("a")
    assert (store.stats.hits, store.stats.misses, store.stats.stored) == (1, 1, 2)


@pytest.mark.parametrize("as_options", [False, True], ids=["url", "options"])
def test_what_one_packs_the_other_reads_and_back(server: RedisServer, as_options: bool) -> None:
    """`tests/resp/test_packed.py` and `test_compress.py` have what is packed, and how."""
    named = {"compress": "lossless"}
    tensors = {"packed": torch.randn(1 << 18).to(torch.bfloat16), "int64": torch.arange(1 << 16)}
    packing = (
        KVStore(RedisOptions(server.url, **named), "packs")
        if as_options
        else KVStore(server.url, "packs", **named)
    )
    with packing, KVStore(server.url, "packs") as plain, server.client() as client:
        for writer, reader in ((packing, plain), (plain, packing)):
            assert writer.put_many(tensors) == 2
            stored = sum(client.strlen(key) for key in client.scan_iter(count=1000))
            nbytes = sum(each.nbytes for each in tensors.values()) + client.dbsize() * 640
            assert (stored < 0.9 * nbytes) if writer is packing else stored == nbytes
            for name, tensor in tensors.items():
                for each in (reader, writer):
                    found = each.get(name)
                    assert found is not None
                    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                    assert torch.equal(found, tensor)
            assert reader.get_bytes("packed") == tensors["packed"].view(torch.uint8).numpy().data
        with KVStore(RedisOptions(server.url, **named), "packs", compress="off") as store:
            assert store.put("packed", tensors["packed"])
            assert sum(client.strlen(key) for key in client.scan_iter(count=1000)) == nbytes


@pytest.mark.parametrize("kind", [bytes, bytearray, np.array, mmap.mmap])
def test_buffers_of_any_kind_are_stored(store: KVStore, kind: type) -> None:
    data = b"0123456789" * 1000
    buffer: object = kind(data) if kind in (bytes, bytearray) else np.frombuffer(data, np.uint16)
    if kind is mmap.mmap:
        buffer = mmap.mmap(-1, len(data))
        buffer[:] = data  # type: ignore[index]
    assert store.put_bytes("b", buffer)  # type: ignore[arg-type]
    assert store.get_bytes("b") == data
    room = np.zeros(6000, np.uint16)
    assert store.get_into("b", room) == len(data)
    assert room.tobytes()[: len(data)] == data
    for wrong, says in (
        (data, "is read-only"),
        (bytearray(16), "'b' has 10000 bytes; the buffer has 16"),
        ("text", "a contiguous buffer of bytes"),
        (np.ones((4, 4))[:, 1], "a contiguous buffer of bytes"),
    ):
        with pytest.raises(FormatError, match=says):
            store.get_into("b", wrong)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="'b' is no tensor: load it with get_bytes"):
        store.get("b")
    assert store.get_into("absent", room) is None
    assert store.get_bytes("absent") is None


def test_many_are_in_flight_at_once(store: KVStore) -> None:
    tensors = {f"t{n}": torch.full((100,), n) for n in range(40)}
    assert store.put_many(tensors) == 40
    assert store.exists_many(["t0", "absent", "t39"]) == [True, False, True]
    found = dict(store.get_many([*tensors, "absent"]))
    assert found.pop("absent") is None
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert sorted(store.names()) == sorted(tensors)


def test_large_values_after_small_ones(store: KVStore) -> None:
    """What a tiny write takes says nothing of how much fits into the queue."""
    large = np.random.default_rng(0).bytes(50 << 20)
    for _ in range(20):
        assert store.put_bytes("small", b"few")
    assert store.put_bytes("large", large)
    assert store.get_bytes("large") == large
    tensors = {f"t{n}": torch.full((40 << 20,), n, dtype=torch.uint8) for n in range(3)}
    store.put_bytes("small", b"few")
    assert store.put_many(tensors) == 3


def test_namespaces_are_apart_and_processes_share(server: RedisServer, store: KVStore) -> None:
    store.put("a", torch.ones(3))
    with KVStore(RedisOptions(server.url), "model") as same, KVStore(server.url, "other") as other:
        assert same.exists("a")
        assert not other.exists("a")
        assert other.get("a") is None
        assert other.names() == []


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (ENVOY[b"SCAN"], "malformed reply to SCAN"),
        (b"-NOPERM no\r\n", "NOPERM"),
        (None, "cannot be used|was lost"),
    ],
)
def test_names_that_cannot_be_listed_are_not_empty(
    server: RedisServer, reply: bytes | None, why: str
) -> None:
    """A program that removes what is not listed would remove everything."""
    with OddProxy(server.port, {b"SCAN": reply}) as proxy, KVStore(proxy.url, "model") as store:
        assert store.put("a", torch.ones(3))
        with pytest.raises(NotListed, match=why):
            store.names()
        assert store.get("a") is not None


@pytest.mark.parametrize("name", ["", "x" * 64, b"a", 7, None, "\udc80"])
def test_wrong_names_are_told(store: KVStore, name: object) -> None:
    for call in (store.get, store.exists, store.delete, store.get_bytes):
        with pytest.raises(FormatError, match="a name is text of 1 to 63 bytes"):
            call(name)  # type: ignore[operator]


def test_wrong_values_are_told(store: KVStore) -> None:
    with pytest.raises(FormatError, match="a chunk is one dense tensor, not a list"):
        store.put("a", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"a chunk is one dense tensor, not torch\.sparse_coo"):
        store.put("a", torch.ones(3).to_sparse())
    with pytest.raises(FormatError, match="at least one byte"):
        store.put_bytes("a", b"")
    for value in ("text", [1], None, np.ones((4, 4))[:, 1], torch.ones(3)):
        with pytest.raises(FormatError, match="what is put is a contiguous buffer of bytes"):
            store.put_bytes("a", value)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="takes tensors by name, not a list"):
        store.put_many([("a", torch.ones(3))])  # type: ignore[arg-type]
    for names in ("ab", b"ab", None, 7):
        with pytest.raises(FormatError, match="names are a list of names"):
            store.exists_many(names)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match="names are a list of names"):
            list(store.get_many(names))  # type: ignore[arg-type]
    assert store.names() == []


URL = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"namespace": ""}, "a model name has 1 to 1024 bytes"),
        ({"namespace": 5}, "a model name is text"),
        ({"redis": "http://127.0.0.1"}, "must begin with"),
        ({"redis": None}, "redis is a URL or RedisOptions, not NoneType"),
        ({"memory_bytes": -1}, "it must be positive"),
        ({"memory_bytes": "1GiB"}, "limit_bytes is '1GiB'"),
        ({"memory_bytes": 1.5}, "limit_bytes is 1.5"),
        ({"deadline_s": "x"}, "deadline_s is 'x'"),
        ({"deadline_s": 0}, "deadline_s is 0; it must be from 0.01"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"compress": "zstd"}, r"^compress is 'zstd': choose one of off, lossless"),
        ({"device": "gpu"}, "the device is 'gpu': choose cpu or cuda"),
    ],
)
def test_wrong_settings_are_told(named: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=says):
        KVStore(**{"redis": URL, **named})


def test_without_torch_bytes_work_and_tensors_say_why_not(server: RedisServer) -> None:
    KVStore(server.url).put("tensor", torch.ones(3))
    script = f"""
import sys
sys.modules["torch"] = None
from lmcache_redis import KVStore
from lmcache_redis.errors import ConfigError

with KVStore({server.url!r}) as store:
    assert store.put_bytes("bytes", b"data")
    assert store.get_bytes("bytes") == b"data"
    assert len(store.get_bytes("tensor")) == 12
    assert store.get_into("bytes", bytearray(4)) == 4
    assert store.exists_many(["bytes", "tensor", "absent"]) == [True, True, False]
    assert sorted(store.names()) == ["bytes", "tensor"]
    for call in (
        lambda: store.get("tensor"),
        lambda: store.get("absent"),
        lambda: list(store.get_many(["bytes"])),
        lambda: store.put("a", [1.0]),
        lambda: store.put_many({{"a": [1.0]}}),
    ):
        try:
            call()
        except ConfigError as error:
            assert "tensors need torch" in str(error), error
            assert "`pip install torch`" in str(error), error
        else:
            raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_that_is_down_is_no_miss(own_server: RedisServer) -> None:
    server = own_server
    with KVStore(server.url) as store:
        assert store.put("a", torch.ones(3))
        assert store.why_down == ""
        assert ", up, " in repr(store)
        server.kill()
        assert store.get("a") is None
        wait_until(lambda: store.why_down, "the loss of the server")
        assert store.get("a") is None
        assert server.url.split("//")[1] in store.why_down
        assert not store.put("a", torch.ones(3))
        assert store.stats.not_stored == 1
        assert store.why_down in repr(store)
    for call in (store.get, store.get_bytes, store.exists, store.delete):
        with pytest.raises(Closed, match="the store is closed"):
            call("a")
    assert issubclass(Closed, RuntimeError)


def test_asyncio(server: RedisServer) -> None:
    async def main() -> None:
        async with AsyncKVStore(server.url, "model") as store:
            names = [f"n{n}" for n in range(20)]
            tensors = [torch.full((1000,), n) for n in range(20)]
            assert all(await asyncio.gather(*map(store.put, names, tensors)))
            loaded = await asyncio.gather(*map(store.get, names))
            assert all(map(torch.equal, loaded, tensors))
            found = {name: tensor async for name, tensor in store.get_many([*names, "absent"])}
            assert found["absent"] is None
            assert len(found) == 21
            assert await store.put_many({"m": tensors[1]}) == 1
            assert await store.exists_many(["m", "absent"]) == [True, False]
            assert await store.put_bytes("b", b"data")
            assert await store.get_bytes("b") == b"data"
            assert await store.get_into("b", bytearray(4)) == 4
            assert len(await store.names()) == 22
            assert await store.delete("b")
            assert not await store.exists("b")
            assert store.stats.hits == 42
            assert store.why_down == ""
            assert repr(store).startswith("AsyncKVStore(")
        with pytest.raises(RuntimeError):
            await store.get("m")

    asyncio.run(main())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("store_*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path, server: RedisServer) -> None:
    ran = subprocess.run([sys.executable, path, server.url], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "loaded them again" in ran.stdout


def test_an_example_says_that_its_server_is_down() -> None:
    words = [sys.executable, EXAMPLES / "store_asyncio.py", "redis://127.0.0.1:1"]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "127.0.0.1:1" in ran.stderr


def test_the_package_has_what_programs_use() -> None:
    assert {"KVStore", "AsyncKVStore", "RedisOptions"} == set(lmcache_redis.__all__)
    for name in lmcache_redis.__all__:
        assert getattr(lmcache_redis, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'kvstor'"):
        lmcache_redis.kvstor  # noqa: B018
