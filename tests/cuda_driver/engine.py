# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV caches are in memory of this driver: torch's CPU tensors over it.

    with gpus(devices=2, delay_us=500) as host, AgentServer(...) as agent:
        with GpuEngine(agent.endpoint, host, world_size=2, memory="pieces") as engine: ...

`lmcache_redis.device.export` says which GPU a tensor is on, and gives torch's current stream: these
two functions are replaced, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from lmcache_redis.device import driver, export, signals
from tests import cuda_driver
from tests.harness import Engine

# Each layer in an allocation of its own; all in one, as torch's segments are; all in memory that is
# mapped in pieces, which can be exported by descriptors, not at all, or for a fabric alone.
Memory = Literal["allocations", "segment", "pieces", "unexportable pieces", "fabric pieces"]
_HANDLE_TYPES = {
    "pieces": cuda_driver.BY_DESCRIPTOR,
    "unexportable pieces": 0,
    "fabric pieces": cuda_driver.BY_FABRIC,
}

PIECE_BYTES = cuda_driver.PIECE_BYTES
_ALIGNED = 512
_BEFORE_BYTES = 1 << 20  # in a segment or in pieces, so that layers lie across pieces


class Host:
    """GPU memory and the streams of this process; all is freed by `close`."""

    def __init__(self) -> None:
        self._contexts: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._allocations: list[tuple[int, int]] = []  # GPU and address
        self._mapped: list[tuple[int, int, int]] = []  # GPU, address and size
        self._ranges: list[tuple[range, int]] = []  # of addresses, with their GPU
        self._sent: list[Any] = []  # the sources of copies that may not have ended

    def gpu_of(self, tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        return next((gpu for each, gpu in self._ranges if address in each), None)

    def on(self, gpu: int) -> AbstractContextManager[None]:
        """In the GPU's context, which this process keeps, as torch does."""
        if gpu not in self._contexts:
            self._contexts[gpu] = driver.retain_context(gpu)
        return driver.in_context(self._contexts[gpu])

    def stream(self, gpu: int) -> int:
        """The one that torch has as its current stream."""
        if gpu not in self._streams:
            with self.on(gpu):
                self._streams[gpu] = driver.create_stream()
        return self._streams[gpu]

    def allocate(self, gpu: int, size_bytes: int) -> int:
        """Of a whole number of pieces, as torch's segments are."""
        size_bytes = -(-size_bytes // PIECE_BYTES) * PIECE_BYTES
        with self.on(gpu):
            address = driver.allocate(size_bytes)
        self._allocations.append((gpu, address))
        self._ranges.append((range(address, address + size_bytes), gpu))
        return address

    def map_pieces(self, gpu: int, size_bytes: int, handle_types: int) -> int:
        """Memory as of expandable segments: address space, and a piece of memory for each part."""
        size_bytes = -(-size_bytes // PIECE_BYTES) * PIECE_BYTES
        with self.on(gpu):
            base = driver.reserve_addresses(size_bytes)
        self._map(gpu, base, size_bytes, handle_types)
        self._mapped.append((gpu, base, size_bytes))
        self._ranges.append((range(base, base + size_bytes), gpu))
        return base

    def sleep(self) -> None:
        """Unmaps all pieces, as vLLM's cumem allocator does; their addresses stay reserved."""
        self.synchronize()
        for gpu, base, size_bytes in self._mapped:
            with self.on(gpu):
                driver.unmap(base, size_bytes)

    def wake(self) -> None:
        """Maps other memory at the addresses."""
        for gpu, base, size_bytes in self._mapped:
            self._map(gpu, base, size_bytes, _HANDLE_TYPES["pieces"])

    def _map(self, gpu: int, base: int, size_bytes: int, handle_types: int) -> None:
        # CUmemAllocationProp
        properties = (ctypes.c_uint * 8)(1, handle_types, 1, gpu)
        size = ctypes.c_size_t(PIECE_BYTES)
        with self.on(gpu):
            for address in range(base, base + size_bytes, PIECE_BYTES):
                piece = ctypes.c_uint64()
                made = cuda_driver.load().cuMemCreate(
                    ctypes.byref(piece), size, properties, ctypes.c_uint64(0)
                )
                assert made == 0
                driver.map_allocation(address, PIECE_BYTES, piece.value)
                driver.release_allocation(piece.value)
            driver.allow_access(base, size_bytes, gpu)

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        raw = (ctypes.c_uint8 * size).from_address(address)
        return torch.frombuffer(raw, dtype=dtype).view(*shape)

    def tensors(
        self,
        names: Sequence[str],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        gpu: int = 0,
        memory: Memory = "allocations",
    ) -> dict[str, torch.Tensor]:
        """New tensors of one shape, each the whole of its storage."""
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if memory == "allocations":
            addresses = [self.allocate(gpu, size) for _ in names]
        else:
            step = -(-size // _ALIGNED) * _ALIGNED
            whole = _BEFORE_BYTES + step * len(names)
            if memory == "segment":
                base = self.allocate(gpu, whole)
            else:
                base = self.map_pieces(gpu, whole, _HANDLE_TYPES[memory])
            first = base + _BEFORE_BYTES
            addresses = [first + step * number for number in range(len(names))]
        pairs = zip(names, addresses, strict=True)
        return {name: self.tensor(address, shape, dtype) for name, address in pairs}

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Enqueues a copy to a dense tensor on a GPU, behind what is queued on the stream."""
        gpu = self.gpu_of(tensor)
        assert gpu is not None
        assert tensor.is_contiguous()
        source = values.to(tensor.dtype).expand_as(tensor).contiguous().clone()
        self._sent.append(source)
        with self.on(gpu):
            driver.enqueue_copy_in(
                tensor.data_ptr(), source.data_ptr(), source.nbytes, self.stream(gpu)
            )

    def synchronize(self) -> None:
        """Waits for all that is queued."""
        for gpu, stream in self._streams.items():
            with self.on(gpu):
                driver.synchronize_stream(stream)
        self._sent.clear()

    def close(self) -> None:
        """Frees the memory, which no process may have open by now."""
        self.synchronize()
        for gpu, address in self._allocations:
            with self.on(gpu):
                driver.free(address)
        for gpu, address, size_bytes in self._mapped:
            with self.on(gpu):
                driver.unmap(address, size_bytes)
                driver.free_addresses(address, size_bytes)


@contextlib.contextmanager
def gpus(**settings: int) -> Iterator[Host]:
    """GPUs of this process and of those that it starts. settings: of `stub.h`."""
    cuda_driver.load()
    cuda_driver.reset()  # also: the table of this process is its own
    signals.signals_of.cache_clear()
    environment = cuda_driver.environment(**settings)
    for name, value in settings.items():
        cuda_driver.set(name, value)
    host = Host()
    streams: Any = lambda gpu: SimpleNamespace(cuda_stream=host.stream(gpu))  # noqa: E731
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(export, "gpu_of", host.gpu_of),
        mock.patch.object(export, "current_stream", streams),
    ):
        try:
            yield host
        finally:
            signals.signals_of.cache_clear()
            cuda_driver.reset()


class GpuEngine(Engine):
    """Rank N is on GPU N, or on the last of ``gpus``. What it computes is written late."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        host: Host,
        *,
        gpus: Sequence[int] = (0,),
        memory: Memory = "allocations",
        **options: Any,
    ) -> None:
        self._host = host
        self._gpus = gpus
        self._memory = memory
        super().__init__(endpoint, **options)

    def new_caches(
        self, rank: int, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        gpu = self._gpus[min(rank, len(self._gpus) - 1)]
        caches = self._host.tensors(names, shape, dtype, gpu=gpu, memory=self._memory)
        for tensor in caches.values():
            self._host.write(tensor, torch.zeros(1))
        return caches

    def randomize(self, block_ids: Sequence[int]) -> None:
        self._write(block_ids, lambda tensor: torch.rand(tensor.shape))

    def zero(self, block_ids: Sequence[int]) -> None:
        """As vLLM does with new blocks."""
        self._write(block_ids, lambda tensor: torch.zeros(1))

    def snapshot(self) -> list[dict[str, torch.Tensor]]:
        self._host.synchronize()
        return super().snapshot()

    def _write(self, block_ids: Sequence[int], values: Any) -> None:
        for caches in self.caches:
            for tensor in caches.values():
                for block in block_ids:
                    self._host.write(tensor[block], values(tensor[block]))
