"""Device memory of any kind: an engine exports its KV cache, the agent opens it.

Life cycle: a worker registers handles and a layout; `open_device` maps the memory once and checks
the layout against its size; gathers and scatters run on the agent's copy threads, several at a
time, one chunk a call, or several if chunks are small and a call is expensive;
`DeviceContext.close` waits for the calls in progress and unmaps. After the engine has died a
context still works on CPU memory (the mapping keeps it) and raises DeviceError on CUDA memory.

Only this module chooses between devices. Torch is imported only where tensors or GPUs are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lmcache_redis.device.handles import (
    CudaIPCHandle,
    ExportedCaches,
    SharedMemoryHandle,
    StorageHandle,
)
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch


class DeviceContext(Protocol):
    """One worker's paged KV cache, mapped. Every method may raise DeviceError.

    A call moves ``chunks`` chunks of equally many blocks: ``block_ids`` has those of the first in
    token order, then those of the second; ``slots`` likewise. Slots are writable memoryviews of
    bytes, one a stripe, at least as long as their stripe's payload; they and the blocks belong to
    the call until it returns. Arguments are checked before the first byte moves: a call that
    refuses an argument has changed nothing.

    ``until_ns`` (``time.monotonic_ns()``) is the end of the lease: after it the engine may reuse
    the blocks. A call that waits until then for a CUDA stream or for the engine's event raises and
    has not touched them. On the CPU a call checks the lease before each MiB: one that becomes late
    raises too, and has copied a part.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def call_bytes(self) -> int:
        """Bytes that a call should move at least, in whole chunks; 0: one chunk a call."""
        ...

    @property
    def on_host_cores(self) -> bool:
        """Whether the engine computes on the cores that the agent uses for copies and transfers."""
        ...

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None = None,
        on_blocks_read: Callable[[], None] | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
    ) -> None:
        """Copy the chunks in ``block_ids`` into ``slots``; return when the copies are complete.

        On a GPU ``on_blocks_read`` is called once, on the same thread, when the blocks have been
        read, long before the return; from then on the engine may reuse them. On the CPU it is not
        called: the blocks are read when the call returns.

        ``event`` is the engine's interprocess event after which the blocks may be read; None if the
        engine's memory is coherent already, as on the CPU.
        """
        ...

    def scatter(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        skip_blocks: int = 0,
        event: bytes | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
    ) -> None:
        """Copy the chunks in ``slots`` into ``block_ids``.

        The first ``skip_blocks`` blocks of ``block_ids`` are not written.

        ``event`` as for `gather`: after it the blocks may be written (an engine on a GPU may
        still have the zeroing of fresh blocks in flight). On return the engine may read them.
        """
        ...

    def close(self) -> None:
        """Wait for calls in progress, then unmap. Later calls raise DeviceError. Idempotent."""
        ...


class PinnedArena(Protocol):
    """Host memory that the GPU reads and writes directly, until ``close``."""

    def close(self) -> None: ...


def export_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    block_strides: Mapping[str, int] | None = None,
) -> ExportedCaches:
    """Make an engine's tensors readable and writable by the agent.

    All tensors are on one device. Raises DeviceError if they cannot be exported.
    """
    devices = {tensor.device.type for tensor in kv_caches.values()}
    if devices == {"cpu"}:
        from lmcache_redis.device.cpu import share_kv_caches

        return share_kv_caches(kv_caches, num_blocks, block_strides)
    if devices == {"cuda"}:
        from lmcache_redis.device.cuda_ipc import export_cuda_caches

        return export_cuda_caches(kv_caches, num_blocks, block_strides)
    raise DeviceError(f"a KV cache on {sorted(devices)}: only one of cpu and cuda is supported")


def open_device(
    layout: KVLayout, storages: Sequence[StorageHandle], allowed: str = "auto"
) -> DeviceContext:
    """Map a worker's KV cache. Raises DeviceError if that fails or is not ``allowed``."""
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


def pin_for(device: DeviceContext, address: int, size_bytes: int) -> PinnedArena | None:
    """Pin the host pool for copies to and from a GPU; None for other devices.

    Raises DeviceError if the memory cannot be locked; copies work without it, more slowly.
    """
    if device.layout.device != "cuda":
        return None
    from lmcache_redis.device.cuda import CudaDevice, PinnedMemory

    assert isinstance(device, CudaDevice)
    return PinnedMemory(address, size_bytes, device.device)
