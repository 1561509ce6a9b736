# SPDX-License-Identifier: Apache-2.0
"""LMCache's own client: `python -m tests.compat.gateway.lmcache_client PORT [FOLDER]`.

FOLDER: an unpacked wheel of lmcache; without one the package is imported as it is installed. Of
its storage backends only the client is loaded: the others need libraries that it does not.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def load(folder: str | None) -> SimpleNamespace:
    """The parts of LMCache that talk to a server."""
    if folder is not None:
        sys.path.insert(0, folder)
    name = "lmcache.v1.storage_backend"
    package = types.ModuleType(name)
    home = importlib.import_module("lmcache.v1").__path__[0]
    package.__path__ = [str(Path(home) / "storage_backend")]
    sys.modules[name] = package
    modules = (
        "lmcache.utils", "lmcache.v1.protocol", "lmcache.v1.memory_management",
        "lmcache.v1.memory_allocators.ad_hoc_memory_allocator",
        f"{name}.connector.lm_connector",
    )  # fmt: skip
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, modules):
        found |= vars(module)
    return SimpleNamespace(**found)


def keys(lmcache: SimpleNamespace) -> list[Any]:
    """Keys of every form: hashes as bytes and as ints of either sign, layers, tags."""
    tagged = {"lmcache.tag.user": "a%b", "lmcache.tag.team": "c", "other": "not a tag"}
    hashes: list[int | bytes] = [bytes(range(32)), 0x123, -0xABC, 0, (1 << 64) - 1]
    whole = [lmcache.CacheEngineKey("org/model", 8, 3, h, torch.bfloat16) for h in hashes]
    whole.append(lmcache.CacheEngineKey("m", 1, 0, 5, torch.float16, tagged))
    whole.append(lmcache.CacheEngineKey("m", 1, 0, 5, torch.float8_e4m3fn))
    return [*whole, *whole[0].split_layers(3), *whole[-2].split_layers(2)]


async def talk(lmcache: SimpleNamespace, port: int) -> int:
    allocator = lmcache.AdHocMemoryAllocator()
    shape = torch.Size([2, 4, 16, 32])
    metadata = SimpleNamespace(
        get_shapes=lambda: [shape], get_dtypes=lambda: [torch.bfloat16], use_mla=False,
        chunk_size=16, get_num_groups=lambda: 1,
    )  # fmt: skip
    cpu = SimpleNamespace(
        config=SimpleNamespace(extra_config=None, use_layerwise=False),
        metadata=metadata,
        allocate=allocator.allocate,
    )
    loop = asyncio.get_running_loop()
    client = lmcache.LMCServerConnector("127.0.0.1", port, loop, cpu)
    done = 0
    forms = [
        (shape, torch.bfloat16, lmcache.MemoryFormat.KV_2LTD),
        (torch.Size([16, 2, 32]), torch.float16, lmcache.MemoryFormat.KV_T2D),
        (torch.Size([2048, 999]), torch.float32, lmcache.MemoryFormat.EC_TD),
    ]
    for number, key in enumerate(keys(lmcache)):
        size, dtype, fmt = forms[number % len(forms)]
        chunk = allocator.allocate(size, dtype, fmt)
        chunk.tensor.copy_(torch.randn(size).to(dtype))
        assert not await client.exists(key), key
        assert await client.get(key) is None, key
        await client.put(key, chunk)
        assert await client.exists(key), key
        found = await client.get(key)
        assert found is not None, key
        assert found.get_shape() == size
        assert found.get_dtype() == dtype
        assert found.get_memory_format() == fmt
        assert torch.equal(found.tensor, chunk.tensor)
        done += 1
    await client.close()
    return done


def same_messages(lmcache: SimpleNamespace) -> int:
    """Both packages write the same bytes for the same messages, and read each other's."""
    from lmcache_redis.compat import protocol as ours

    done = 0
    for key in keys(lmcache):
        for dtype in lmcache.DTYPE_TO_INT:
            for shape in ((2, 3, 4, 5), (7,), (0, 0, 0, 0)):
                for location in lmcache.LOCATION_TO_INT:
                    theirs = _messages(lmcache, key, 77, torch.Size(shape), dtype, location)
                    own = _messages(ours, key.to_string(), 77, torch.Size(shape), dtype, location)
                    assert [m.serialize() for m in theirs] == [m.serialize() for m in own]
                    for mine in own:
                        assert type(mine).deserialize(mine.serialize()).dtype == dtype
                    done += 1
    assert ours.DTYPE_TO_INT == lmcache.DTYPE_TO_INT
    assert ours.INT_TO_DTYPE == lmcache.INT_TO_DTYPE
    assert lmcache.LOCATION_TO_INT == ours.LOCATION_TO_INT
    assert lmcache.INT_TO_LOCATION == ours.INT_TO_LOCATION
    return done


def same_keys(lmcache: SimpleNamespace) -> None:
    """The facade's keys have the text, the tags and the layers of LMCache's, and its messages."""
    from lmcache_redis.compat import protocol as facade

    names = ("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "request_configs")
    for key in keys(lmcache):
        fields = {name: getattr(key, name) for name in names}
        if isinstance(key, lmcache.LayerCacheEngineKey):
            own: Any = facade.LayerCacheEngineKey(**fields, layer_id=key.layer_id)
        else:
            own = facade.CacheEngineKey(*fields.values())
        assert own.to_string() == key.to_string()
        assert facade.parse_cache_key(key.to_string()) == own
        assert type(own).from_string(key.to_string()).tags == own.tags == key.tags
        for mine, theirs in (
            (own.get_first_layer(), key.get_first_layer()),
            *zip(own.split_layers(3), key.split_layers(3), strict=True),
        ):
            assert mine.to_string() == theirs.to_string()
        said = (77, torch.Size([2, 3, 4, 5]), torch.bfloat16, "LocalDiskBackend")
        ours = _messages(facade, own, *said)
        assert [m.serialize() for m in ours] == [
            m.serialize() for m in _messages(lmcache, key, *said)
        ]
        for message in ours:
            assert type(message).deserialize(message.serialize()) == message


def _messages(
    package: Any, key: Any, length: int, shape: Any, dtype: Any, location: Any
) -> tuple[Any, Any]:
    fmt = package.MemoryFormat(1)
    return (
        package.ClientMetaMessage(
            package.ClientCommand.PUT, key, length, fmt, dtype, shape, location
        ),
        package.ServerMetaMessage(
            package.ServerReturnCode.SUCCESS, length, fmt, dtype, shape, location
        ),
    )


def main() -> None:
    lmcache = load(sys.argv[2] if len(sys.argv) > 2 else None)
    messages = same_messages(lmcache)
    same_keys(lmcache)
    chunks = asyncio.run(talk(lmcache, int(sys.argv[1])))
    print(f"{messages} messages, {chunks} chunks")


if __name__ == "__main__":
    main()
