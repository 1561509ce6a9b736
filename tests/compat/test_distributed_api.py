# SPDX-License-Identifier: Apache-2.0
"""The facade of lmcache.v1.distributed.api."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_redis.chunks import keys
from lmcache_redis.compat.custom_types import IPCCacheEngineKey
from lmcache_redis.compat.distributed_api import (
    MemoryLayoutDesc,
    ObjectKey,
    ipc_keys_to_object_keys,
)
from lmcache_redis.errors import FormatError


def test_the_documented_calls() -> None:
    kv_rank = ObjectKey.ComputeKVRank(
        world_size=8,
        global_rank=5,
        local_world_size=4,
        local_rank=1,
    )
    assert kv_rank == 0x08050401
    key = ObjectKey(chunk_hash=b"\x00\x01", model_name="llama-7b", kv_rank=kv_rank)
    assert (key.chunk_hash, key.model_name, key.kv_rank) == (b"\x00\x01", "llama-7b", kv_rank)
    assert {key: 1}[ObjectKey(b"\x00\x01", "llama-7b", kv_rank)] == 1
    with pytest.raises(AttributeError):
        key.kv_rank = 0  # type: ignore[misc]
    ipc_key_list = [
        IPCCacheEngineKey(model_name="m", world_size=2, worker_id=1, chunk_hash=b"a"),
        IPCCacheEngineKey(model_name="m", world_size=16, worker_id=None, chunk_hash=b"b"),
    ]
    assert ipc_keys_to_object_keys(ipc_keys=ipc_key_list) == [
        ObjectKey(b"a", "m", ObjectKey.ComputeKVRank(2, 1, 2, 1)),
        *(ObjectKey(b"b", "m", ObjectKey.ComputeKVRank(16, w, 16, w)) for w in range(16)),
    ]
    assert ObjectKey.Bytes2IntHash(ObjectKey.IntHash2Bytes(1 << 40)) == 1 << 40
    assert ipc_keys_to_object_keys([]) == []
    assert ObjectKey is keys.ObjectKey


def test_what_names_no_chunk_is_refused() -> None:
    by_tokens = IPCCacheEngineKey("m", 1, 0, token_ids=(1, 2), end=2)
    with pytest.raises(FormatError, match="until the tokens are hashed"):
        ipc_keys_to_object_keys([by_tokens])
    for value in (ObjectKey(b"a", "m", 1), "key", None):
        with pytest.raises(FormatError, match="an IPCCacheEngineKey is converted, not"):
            ipc_keys_to_object_keys([value])  # type: ignore[list-item]


class TestMemoryLayoutDesc:
    def test_keeps_lists_of_torch_types(self) -> None:
        given: Any = ((2, 3), [4])
        layout = MemoryLayoutDesc(shapes=given, dtypes=(torch.int8, torch.uint8))  # type: ignore[arg-type]
        assert layout.shapes == [torch.Size([2, 3]), torch.Size([4])]
        assert [type(shape) for shape in layout.shapes] == [torch.Size] * 2
        assert layout.dtypes == [torch.int8, torch.uint8]
        assert layout == MemoryLayoutDesc([torch.Size([2, 3]), torch.Size([4])], layout.dtypes)
        assert layout != MemoryLayoutDesc([torch.Size([2, 3]), torch.Size([5])], layout.dtypes)

    @pytest.mark.parametrize(
        ("shapes", "dtypes", "message"),
        [
            ([(1,)], [], "1 shapes but 0 dtypes"),
            ([], [torch.int8], "0 shapes but 1 dtypes"),
            ([(-1,)], [torch.int8], "a size in a shape is -1"),
            ([(1.0,)], [torch.int8], "a size in a shape is an int"),
            ([(1,)], ["int8"], "a dtype is a torch.dtype"),
            ([1], [torch.int8], "a shape is a list of sizes, not 1"),
        ],
    )
    def test_what_describes_no_memory_is_refused(
        self, shapes: Any, dtypes: Any, message: str
    ) -> None:
        with pytest.raises(FormatError, match=message):
            MemoryLayoutDesc(shapes, dtypes)
