# SPDX-License-Identifier: Apache-2.0
"""Keys and chunks for tests of backends, and buffers to get them into."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata, torch_dtype
from lmcache_redis.objects import ChunkBackend

FLUSH_S = 30.0


def key_of(number: int, model_name: str = "org/model") -> ObjectKey:
    return ObjectKey(number.to_bytes(8, "big"), model_name, 0x0100_0100)


def tensor_of(seed: int, shape: Sequence[int], dtype: str = "uint8") -> torch.Tensor:
    """Random bits, possibly NaNs: compare with `same`."""
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(seed)
    itemsize = torch.empty(0, dtype=kind).element_size()
    count = torch.Size(shape).numel() * itemsize
    top = 2 if dtype == "bool" else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(*shape)


def raw_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and raw_of(found) == raw_of(expected)
    )


def metadata_of(length: int, fmt: MemoryFormat = MemoryFormat.UNDEFINED) -> RemoteMetadata:
    return RemoteMetadata(length, [(length,)], ["uint8"], fmt)


class Buffers:
    """An `Allocate`: buffers of the given sizes, or one of the chunk's length."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.calls: list[RemoteMetadata] = []
        self.threads: list[int] = []
        self.buffers: list[bytearray] = []

    def __call__(self, metadata: RemoteMetadata) -> list[memoryview]:
        self.calls.append(metadata)
        self.threads.append(threading.get_ident())
        self.buffers = [bytearray(size) for size in self.sizes or (metadata.length,)]
        return [memoryview(buffer) for buffer in self.buffers]

    @property
    def data(self) -> bytes:
        return b"".join(self.buffers)


def get_raw(backend: ChunkBackend, key: ObjectKey) -> bytes | None:
    buffers = Buffers()
    return None if backend.get_bytes(key, buffers) is None else buffers.data


def fill(backend: ChunkBackend, numbers: Iterable[int]) -> None:
    """Puts chunks of 100 bytes."""
    for number in numbers:
        assert backend.put(key_of(number), tensor_of(number, (100,)))


def held(backend: ChunkBackend) -> list[int]:
    return sorted(int.from_bytes(key.chunk_hash, "big") for key in backend.stored_keys())
