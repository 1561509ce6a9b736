"""The two doors to devices: an engine exports its KV cache, the agent opens it.

The only place that chooses between devices; torch is imported by the side that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lmcache_redis.device.base import DeviceContext
from lmcache_redis.device.handles import CudaIPCHandle, SharedMemoryHandle, StorageHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch


class ExportedCaches(NamedTuple):
    """What a registration needs to know of an engine's KV cache."""

    device: str
    segments: tuple[Segment, ...]
    storages: tuple[StorageHandle, ...]
    page_format: str


def export_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    block_strides: Mapping[str, int] | None = None,
) -> ExportedCaches:
    """Makes an engine's tensors readable and writable by the agent.

    All tensors are on one device. Raises DeviceError where they cannot be exported.
    """
    devices = {tensor.device.type for tensor in kv_caches.values()}
    if devices == {"cpu"}:
        from lmcache_redis.device.cpu import share_kv_caches

        segments, handles, page_format = share_kv_caches(kv_caches, num_blocks, block_strides)
        return ExportedCaches("cpu", segments, tuple(handles), page_format)
    if devices == {"cuda"}:
        from lmcache_redis.device.cuda_ipc import export_cuda_caches

        cuda = export_cuda_caches(kv_caches, num_blocks, block_strides)
        return ExportedCaches("cuda", cuda.segments, tuple(cuda.handles), cuda.page_format)
    raise DeviceError(f"a KV cache on {sorted(devices)}: only one of cpu and cuda is supported")


class PinnedArena(Protocol):
    """Host memory that the GPU reads and writes directly, until ``close``."""

    def close(self) -> None: ...


def pin_for(device: DeviceContext, address: int, size_bytes: int) -> PinnedArena | None:
    """Pins the host pool for a device that gains by it; None where there is nothing to pin.

    Raises DeviceError where the memory cannot be locked; copies work without.
    """
    if device.layout.device != "cuda":
        return None
    from lmcache_redis.device.cuda import CudaDevice, pin

    assert isinstance(device, CudaDevice)
    return pin(address, size_bytes, device.device)


def open_device(
    layout: KVLayout, storages: Sequence[StorageHandle], allowed: str = "auto"
) -> DeviceContext:
    """Maps a worker's KV cache. Raises DeviceError where that fails or is not ``allowed``."""
    if allowed not in ("auto", layout.device):
        raise DeviceError(
            f"the engine's KV cache is on {layout.device}, and the agent was started with "
            f"--device {allowed}"
        )
    shared = [storage for storage in storages if isinstance(storage, SharedMemoryHandle)]
    cuda = [storage for storage in storages if isinstance(storage, CudaIPCHandle)]
    if layout.device == "cpu" and not cuda:
        from lmcache_redis.device.cpu import CpuDevice

        return CpuDevice(layout, shared)
    if layout.device == "cuda" and not shared:
        from lmcache_redis.device.cuda import CudaDevice

        return CudaDevice(layout, cuda)
    raise DeviceError(f"handles that do not fit a layout on {layout.device!r}")
