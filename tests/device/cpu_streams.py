"""A `CudaDevice` whose GPU is the CPU: tests its logic on any machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_redis.device import cuda
from lmcache_redis.device.cuda_copies import PageCopies
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import BlockIds
from lmcache_redis.processes import process_start_time
from tests.device.layouts import Paged

STORAGES: dict[int, torch.Tensor] = {}  # by size, which is unique here


class CpuStream:
    """A CUDA stream on the CPU, which runs everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[bytes | None] = []
        self.staged_at_event = b""
        self.marks: list[Mark] = []
        self._staging = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield

    def staging(self, nbytes: int) -> torch.Tensor:
        self._staging = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        return self._staging

    def send(self, ids: np.ndarray) -> BlockIds:
        return BlockIds(ids, torch.from_numpy(ids))

    def after(self, event: bytes | None, until_ns: int | None) -> None:
        self.events.append(event)
        self.staged_at_event = self._staging.numpy().tobytes()

    def mark(self) -> Mark:
        self.marks.append(Mark(self._staging))
        return self.marks[-1]


class Mark:
    """An event of such a stream: what was staged when it was recorded, and when it was awaited."""

    def __init__(self, staging: torch.Tensor) -> None:
        self._staging = staging
        self.staged = staging.numpy().tobytes()
        self.staged_when_awaited: bytes | None = None

    def synchronize(self) -> None:
        self.staged_when_awaited = self._staging.numpy().tobytes()


@contextlib.contextmanager
def gpu_is_cpu(copies: type[Any] | None = None) -> Iterator[None]:
    """Devices opened in the block lie in `STORAGES`. copies: used in place of `page_copies`."""

    def chosen(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
        assert copies is not None
        return copies(layout, storages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_CopyStream", CpuStream)
        patch.setattr(cuda, "open_flat", lambda handle: STORAGES[handle.storage_size_bytes])
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        if copies is not None:
            patch.setattr(cuda, "page_copies", chosen)
        yield


def open_over_cpu(case: Paged, **changes: Any) -> cuda.CudaDevice:
    """The case's memory as a device; its storages are replaced by longer ones of equal content.

    changes: of every handle.
    """
    longest = max(case.sizes)
    case.storages = [
        np.concatenate([storage, np.zeros(longest + index - storage.size, np.uint8)])
        for index, storage in enumerate(case.storages)
    ]
    STORAGES.clear()
    STORAGES.update((each.size, torch.from_numpy(each)) for each in case.storages)
    return cuda.CudaDevice([case.layout], [flat_handle(size, **changes) for size in case.sizes])


def flat_handle(size_bytes: int, **changes: Any) -> CudaIPCHandle:
    pid = os.getpid()
    fields: dict[str, Any] = {
        "pid": pid,
        "pid_start_time": process_start_time(pid),
        "device_uuid": "GPU-0",
        "memory_handle": bytes(64),
        "storage_size_bytes": size_bytes,
        "storage_offset_bytes": 0,
        "ref_counter_handle": b"/torch_1_2_3",
        "ref_counter_offset": 0,
        "dtype": "uint8",
        "shape": (size_bytes,),
        "stride": (1,),
    }
    return CudaIPCHandle(**(fields | changes))
