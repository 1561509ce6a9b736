"""KV caches in GPU memory: gathered into contiguous staging there, copied to pinned slots.

Every call works on a lane of its own: a stream and a staging buffer of one chunk. A gather
selects the chunk's pages into staging (one kernel a batch of layers) and copies staging to the
slots; a scatter does the reverse. The engine's interprocess event orders the lane's stream
after the engine's work. A call returns when its last copy is done: until then the slots and
blocks belong to it, also when it fails.

The agent pins its arena once with `pin`; unpinned slots work, at the speed of pageable memory.
No context is made on a GPU that no worker registered.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lmcache_redis.device.calls import Calls
from lmcache_redis.device.cuda_ipc import CudaIPCWrapper
from lmcache_redis.device.handles import CudaIPCHandle, is_running
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.plan import Planner, check_slots
from lmcache_redis.device.staging import Batch, plan_batches
from lmcache_redis.errors import DeviceError

EVENT_HANDLE_BYTES = 64  # sizeof(cudaIpcEventHandle_t)
_EVENT_DEADLINE_S = 30.0
_EVENT_POLL_S = 100e-6
_LANE_DEADLINE_S = 60.0
_LANES = 2
_HOST_REGISTER_PORTABLE = 1
_ELEMENT_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class CudaDevice:
    """The agent's mapping of one worker's KV cache on one GPU; a `DeviceContext`.

    Args:
        layout: as received; it is checked against the memory that was really opened.
        handles: flat uint8 storages, one for each storage that the layout's segments name.
        lanes: calls that may be in progress on the GPU at once; others wait.

    Raises:
        DeviceError: a handle cannot be opened (the sentence says what to change), or the
            layout leaves its storages.
    """

    def __init__(
        self, layout: KVLayout, handles: Sequence[CudaIPCHandle], lanes: int = _LANES
    ) -> None:
        layout.check([handle.storage_size_bytes for handle in handles])
        if len({handle.device_uuid for handle in handles}) != 1:
            raise DeviceError("the storages of one worker's KV cache are on different GPUs")
        self.layout = layout
        self._exporter = (handles[0].pid, handles[0].pid_start_time)
        self._planner = Planner(layout)
        self._calls = Calls()
        self._storages = [open_flat(handle) for handle in handles]
        self.device = self._storages[0].device
        batches = plan_batches(layout, [storage.data_ptr() for storage in self._storages])
        self._pages = [
            (batch, view_pages(self._storages[batch.storage], batch, layout.num_blocks))
            for batch in batches
        ]
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        for _ in range(lanes):
            self._lanes.put(_Lane(self.device))

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None = None,
    ) -> None:
        """Copy a chunk out of its blocks, once the engine's event has happened."""
        with self._lane(block_ids, slots, stripe_payload_bytes, event) as lane:
            staging, ids = lane.prepare(block_ids, self._planner.block_bytes)
            gather_pages(self._pages, ids, staging)
            for part, slot in _stripes(staging, slots, stripe_payload_bytes):
                slot.copy_(part, non_blocking=True)

    def scatter(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        skip_blocks: int = 0,
        event: bytes | None = None,
    ) -> None:
        """Copy a chunk into its blocks, but for the first ``skip_blocks``, after the event."""
        if not 0 <= skip_blocks <= len(block_ids):
            raise DeviceError(f"{skip_blocks} of {len(block_ids)} blocks to skip")
        with self._lane(block_ids, slots, stripe_payload_bytes, event) as lane:
            staging, ids = lane.prepare(block_ids, self._planner.block_bytes)
            for part, slot in _stripes(staging, slots, stripe_payload_bytes):
                part.copy_(slot, non_blocking=True)
            scatter_pages(self._pages, ids, staging, skip_blocks)

    def close(self) -> None:
        """Wait for calls in progress, then unmap and give the staging memory back. Idempotent."""
        if not self._calls.close():
            return
        self._pages.clear()
        while not self._lanes.empty():
            self._lanes.get_nowait()
        with torch.cuda.device(self.device):
            # Dropping the storages closes their IPC handles: the engine's memory is not held.
            self._storages.clear()
            torch.cuda.empty_cache()

    @contextmanager
    def _lane(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None,
    ) -> Iterator[_Lane]:
        """A lane whose stream is current and comes after ``event``; drained on the way out."""
        self._planner.checked_ids(block_ids)
        check_slots(slots, len(block_ids) * self._planner.block_bytes, stripe_payload_bytes)
        check_event(event)
        if not is_running(*self._exporter):
            raise DeviceError(f"process {self._exporter[0]}, whose KV cache this is, has ended")
        with self._calls.inside():
            try:
                lane = self._lanes.get(timeout=_LANE_DEADLINE_S)
            except queue.Empty:
                raise DeviceError(f"no lane to {self.device} within {_LANE_DEADLINE_S} s") from None
            try:
                with lane.running(event):
                    yield lane
            except RuntimeError as error:
                raise DeviceError(f"a copy on {self.device} failed: {error}") from error
            finally:
                self._lanes.put(lane)


class _Lane:
    """One stream and the staging buffer of the call that has it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    @contextmanager
    def running(self, event: bytes | None) -> Iterator[None]:
        """Make the stream current. Returns only when nothing of it is in flight any more."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            waited = None if event is None else self._after(event)
            try:
                yield
            finally:
                self._stream.synchronize()
                del waited

    def prepare(
        self, block_ids: Sequence[int], block_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's staging bytes and its block ids, both on the GPU."""
        nbytes = len(block_ids) * block_bytes
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
        return self._staging[:nbytes], ids

    def _after(self, event: bytes) -> torch.cuda.Event:
        opened = torch.cuda.Event.from_ipc_handle(self._device, event)
        # Polled with a deadline before anything is queued behind it: an engine that hangs
        # would otherwise hold this thread, and slots that the GPU may still write to, for good.
        deadline_s = time.monotonic() + _EVENT_DEADLINE_S
        while not opened.query():
            if time.monotonic() > deadline_s:
                raise DeviceError(f"the engine's event did not happen within {_EVENT_DEADLINE_S} s")
            time.sleep(_EVENT_POLL_S)
        opened.wait(self._stream)
        return opened


class PinnedMemory:
    """Host memory that GPUs copy to and from directly, until `close`."""

    def __init__(self, address: int, device: torch.device) -> None:
        self._address: int | None = address
        self._device = device

    def close(self) -> None:
        """Unpin. Idempotent. The memory must still be mapped, and no copy in progress on it."""
        if self._address is not None:
            with torch.cuda.device(self._device):
                code = int(torch.cuda.cudart().cudaHostUnregister(self._address))
            self._address = None
            if code:
                raise DeviceError(f"host memory could not be unpinned: CUDA error {code}")


def pin(address: int, size_bytes: int, device: torch.device) -> PinnedMemory:
    """Pin page-aligned host memory for every GPU; once, for the whole arena. Takes seconds.

    Args:
        device: a GPU in use already: pinning makes a context on the current one.

    Raises:
        DeviceError: the memory cannot be locked; the sentence says what to change.
    """
    with torch.cuda.device(device):
        code = int(
            torch.cuda.cudart().cudaHostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE)
        )
    if code:
        raise DeviceError(
            f"{size_bytes} bytes of host memory could not be pinned (CUDA error {code}): raise the "
            "limit of locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1), or set "
            "a smaller host pool; copies work without, at a fraction of the speed"
        )
    return PinnedMemory(address, device)


def open_flat(handle: CudaIPCHandle) -> torch.Tensor:
    """A storage as a flat uint8 tensor of exactly its size."""
    if handle.dtype != "uint8" or handle.shape != (handle.storage_size_bytes,):
        raise DeviceError(
            f"a KV cache storage of {handle.storage_size_bytes} bytes, registered as "
            f"{list(handle.shape)} {handle.dtype}: storages are flat uint8"
        )
    return CudaIPCWrapper.from_handle(handle).to_tensor()


def check_event(event: bytes | None) -> None:
    """Raise DeviceError unless it may be a CUDA IPC event handle."""
    if event is not None and len(event) != EVENT_HANDLE_BYTES:
        raise DeviceError(f"a CUDA event handle of {len(event)} bytes")


def view_pages(storage: torch.Tensor, batch: Batch, num_blocks: int) -> torch.Tensor:
    """The batch's pages as ``[segments, num_blocks, page elements]`` over a flat uint8 storage."""
    size = batch.element_bytes
    whole = storage[: storage.numel() // size * size].view(_ELEMENT_TYPES[size])
    return whole.as_strided(
        (batch.segment_count, num_blocks, batch.page_bytes // size),
        (batch.segment_step // size, batch.block_stride // size, 1),
        batch.offset // size,
    )


def gather_pages(
    pages: Sequence[tuple[Batch, torch.Tensor]], block_ids: torch.Tensor, staging: torch.Tensor
) -> None:
    """Select the blocks of every batch into flat uint8 staging, which becomes the chunk."""
    for batch, view in pages:
        torch.index_select(view, 1, block_ids, out=_part(staging, batch, len(block_ids)))


def scatter_pages(
    pages: Sequence[tuple[Batch, torch.Tensor]],
    block_ids: torch.Tensor,
    staging: torch.Tensor,
    skip_blocks: int,
) -> None:
    """The reverse of `gather_pages`, but for the first ``skip_blocks``.

    Where a block is named twice, either of its pages may win.
    """
    for batch, view in pages:
        part = _part(staging, batch, len(block_ids))
        view.index_copy_(1, block_ids[skip_blocks:], part[:, skip_blocks:])


def _part(staging: torch.Tensor, batch: Batch, n_blocks: int) -> torch.Tensor:
    begin = batch.bytes_before * n_blocks
    nbytes = batch.segment_count * batch.page_bytes * n_blocks
    part = staging[begin : begin + nbytes].view(_ELEMENT_TYPES[batch.element_bytes])
    return part.view(batch.segment_count, n_blocks, -1)


def _stripes(
    staging: torch.Tensor, slots: Sequence[memoryview], stripe_payload_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each stripe of the staged chunk with its slot, as tensors of one length."""
    for part, slot in zip(staging.split(stripe_payload_bytes), slots, strict=True):
        yield part, torch.frombuffer(slot, dtype=torch.uint8, count=part.numel())
