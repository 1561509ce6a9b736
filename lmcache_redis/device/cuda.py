"""KV caches in GPU memory: gathered into contiguous staging there, copied to pinned slots.

Every call works on a lane of its own: a stream, and staging for one chunk. A gather is one kernel
that reads the chunk's pages into staging, and then a copy to each slot; a scatter is the reverse.
While one lane's copies are on the bus, which takes tens of times as long as the kernel, the kernel
of the next chunk runs on another lane: the bus does not wait, as long as two threads call. Gathers
and scatters have lanes of their own, for a gather that waits for the engine must not keep a lane
from a request that waits for its scatter.

What waits for what:

    event of the engine ──▶ kernel         on the stream, and seen by the host before it is queued
    kernel ──▶ copies to slots             on the stream (gather)
    kernel ──▶ the blocks are the engine's on the host (gather), beside those copies
    each 8 MiB of these ──▶ slots are filled   on the host (gather), beside the next
    copies to staging ──▶ kernel           on the stream (scatter); they do not wait for the event
    the last of these ──▶ return           the host sleeps meanwhile: it burns no core

The kernel is queued only after the host has seen the event happen, because what is queued cannot be
taken back: a scatter behind an event that comes after the deadline would write to blocks that the
engine has given to somebody else by then.

A gather has read its blocks long before it returns. It says so (``read``) as soon as its kernel has
ended: staging owns the bytes from then on, and the engine its blocks. Of the slots it says
(``filled``) every 8 MiB how many have their bytes, so that their way to Redis can begin.

A call costs the host a fraction of a millisecond whatever it moves: so small chunks go several a
call (`call_bytes`), in one launch. They fail or are late together.

The agent pins its arena once with `pin`; unpinned slots work, at the speed of pageable memory.
No context is made on a GPU that no worker registered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from lmcache_redis.device.calls import Calls
from lmcache_redis.device.cuda_copies import BlockIds, PageCopies, page_copies
from lmcache_redis.device.cuda_ipc import CudaIPCWrapper
from lmcache_redis.device.handles import CudaIPCHandle, is_running
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.plan import Chunk, check_slots, chunks_of_call
from lmcache_redis.device.table import pack_ids, staging_stride_bytes
from lmcache_redis.errors import DeviceError

EVENT_HANDLE_BYTES = 64  # sizeof(cudaIpcEventHandle_t)
_EVENT_DEADLINE_S = 30.0
_EVENT_POLL_S = 100e-6
_LANE_DEADLINE_S = 60.0
_UNPIN_DEADLINE_S = 5.0
_LANES = 2
_CALL_BYTES = 32 << 20
# Between two words that slots are filled: some 0.05 ms of the host's time, and 0.15 of the bus's.
_STEP_BYTES = 8 << 20
_HOST_REGISTER_PORTABLE = 1

_Int64s = npt.NDArray[np.int64]
_Lanes = queue.LifoQueue["_Lane"]


class CudaDevice:
    """The agent's mapping of one worker's KV cache on one GPU; a `DeviceContext`.

    Args:
        layout: as received; it is checked against the memory that was really opened.
        handles: flat uint8 storages, one for each storage that the layout's segments name.
        lanes: gathers that may be in progress on the GPU at once, and as many scatters; others
            wait.

    Raises:
        DeviceError: a handle cannot be opened (the sentence says what to change), or the
            layout leaves its storages.
    """

    call_bytes = _CALL_BYTES
    on_host_cores = False

    def __init__(
        self, layout: KVLayout, handles: Sequence[CudaIPCHandle], lanes: int = _LANES
    ) -> None:
        layout.check([handle.storage_size_bytes for handle in handles])
        if len({handle.device_uuid for handle in handles}) != 1:
            raise DeviceError("the storages of one worker's KV cache are on different GPUs")
        self.layout = layout
        self._block_bytes = layout.block_bytes
        self._exporter = (handles[0].pid, handles[0].pid_start_time)
        self._calls = Calls()
        self._storages = [open_flat(handle) for handle in handles]
        self.device = self._storages[0].device
        with torch.cuda.device(self.device):
            self._copies: PageCopies | None = page_copies(layout, self._storages)
        self._gathers: _Lanes = queue.LifoQueue()
        self._scatters: _Lanes = queue.LifoQueue()
        for _ in range(lanes):
            self._gathers.put(_Lane(self.device))
            self._scatters.put(_Lane(self.device))

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None = None,
        read: Callable[[], None] | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Copy chunks out of their blocks, once the engine's event has happened."""
        cut = chunks_of_call(block_ids, slots, 0, chunks)
        ids = self._checked(cut, stripe_payload_bytes, event)
        with self._lane(self._gathers, ids, until_ns) as (lane, copies, staging):
            sent = lane.send(ids)
            lane.after(event, until_ns)
            copies.gather(sent, staging)
            kernel = lane.mark()
            steps: list[tuple[int, torch.cuda.Event]] = []
            step_bytes = 0
            stripes = self._stripes(staging, cut, stripe_payload_bytes)
            for number, (part, slot) in enumerate(stripes):
                if step_bytes >= _STEP_BYTES and filled is not None:
                    steps.append((number, lane.mark()))
                    step_bytes = 0
                slot.copy_(part, non_blocking=True)
                step_bytes += part.numel()
            if read is not None:
                kernel.synchronize()
                read()
            if filled is not None:
                for slots_filled, copied in steps:
                    copied.synchronize()
                    filled(slots_filled)

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
        """Copy chunks into their blocks, but for the first ``skip_blocks``, after the event."""
        cut = chunks_of_call(block_ids, slots, skip_blocks, chunks)
        ids = self._checked(cut, stripe_payload_bytes, event)
        with self._lane(self._scatters, ids, until_ns) as (lane, copies, staging):
            sent = lane.send(ids)
            for part, slot in self._stripes(staging, cut, stripe_payload_bytes):
                part.copy_(slot, non_blocking=True)
            lane.after(event, until_ns)
            copies.scatter(sent, staging)

    def close(self) -> None:
        """Wait for calls in progress, then unmap and give the staging memory back. Idempotent."""
        if not self._calls.close():
            return
        self._copies = None
        for lanes in (self._gathers, self._scatters):
            while not lanes.empty():
                lanes.get_nowait()
        with torch.cuda.device(self.device):
            # Dropping the storages closes their IPC handles: the engine's memory is not held.
            self._storages.clear()
            torch.cuda.empty_cache()

    def _checked(
        self, cut: Sequence[Chunk], stripe_payload_bytes: int, event: bytes | None
    ) -> _Int64s:
        """The ids as a kernel takes them. Raises DeviceError for anything out of bounds."""
        ids = pack_ids(
            [chunk.block_ids for chunk in cut],
            self.layout.num_blocks,
            [chunk.skip_blocks for chunk in cut],
        )
        for chunk in cut:
            check_slots(chunk.slots, ids.shape[1] * self._block_bytes, stripe_payload_bytes)
        check_event(event)
        if not is_running(*self._exporter):
            raise DeviceError(f"process {self._exporter[0]}, whose KV cache this is, has ended")
        return ids

    @contextmanager
    def _lane(
        self, lanes: _Lanes, ids: _Int64s, until_ns: int | None
    ) -> Iterator[tuple[_Lane, PageCopies, torch.Tensor]]:
        """A lane whose stream is current, with staging for the chunk; drained on the way out."""
        with self._calls.inside():
            copies = self._copies
            assert copies is not None
            patience_s = _left_s(_LANE_DEADLINE_S, until_ns)
            try:
                lane = lanes.get(timeout=max(0.0, patience_s))
            except queue.Empty:
                raise DeviceError(f"no lane to {self.device} within {patience_s:.1f} s") from None
            try:
                with lane.running():
                    yield lane, copies, lane.staging(self._staged_bytes(*ids.shape))
            except RuntimeError as error:
                raise DeviceError(f"a copy on {self.device} failed: {error}") from error
            finally:
                lanes.put(lane)

    def _staged_bytes(self, chunks: int, blocks: int) -> int:
        chunk_bytes = blocks * self._block_bytes
        return (chunks - 1) * staging_stride_bytes(chunk_bytes) + chunk_bytes

    def _stripes(
        self, staging: torch.Tensor, cut: Sequence[Chunk], stripe_payload_bytes: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each stripe of the staged chunks with its slot, as tensors of one length."""
        chunk_bytes = len(cut[0].block_ids) * self._block_bytes
        staged = staging.split(staging_stride_bytes(chunk_bytes))
        for chunk, whole in zip(cut, staged, strict=True):
            parts = whole[:chunk_bytes].split(stripe_payload_bytes)
            for part, slot in zip(parts, chunk.slots, strict=True):
                yield part, torch.frombuffer(slot, dtype=torch.uint8, count=part.numel())


class _Lane:
    """One stream, and the buffers of the call that has it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Blocking: whoever waits for it sleeps. By default CUDA's waits spin.
        self._drained = torch.cuda.Event(blocking=True)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._ids_host = torch.empty(0, dtype=torch.int64)
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._awaited: torch.cuda.Event | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the stream current. Returns only when nothing of it is in flight any more."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._drained.record(self._stream)
                self._drained.synchronize()
                self._awaited = None

    def mark(self) -> torch.cuda.Event:
        """An event after what was queued up to here; whoever waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def staging(self, nbytes: int) -> torch.Tensor:
        """That many bytes on the GPU, aligned to 256."""
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes]

    def send(self, ids: _Int64s) -> BlockIds:
        """The block ids on the GPU: through pinned memory, so that the host does not wait."""
        if self._ids.numel() < ids.size:
            self._ids_host = torch.empty(ids.size, dtype=torch.int64, pin_memory=True)
            self._ids = torch.empty(ids.size, dtype=torch.int64, device=self._device)
        host = self._ids_host[: ids.size]
        host.numpy()[:] = ids.ravel()
        sent = self._ids[: ids.size]
        sent.copy_(host, non_blocking=True)
        return BlockIds(ids, sent.view(ids.shape))

    def after(self, event: bytes | None, until_ns: int | None) -> None:
        """Order what is queued from here on after the engine's event, once that has happened.

        Raises:
            DeviceError: it did not within the deadline, or the blocks are the engine's again.
                Nothing waits for it on the stream.
        """
        if event is not None:
            opened = torch.cuda.Event.from_ipc_handle(self._device, event)
            deadline_s = time.monotonic() + _left_s(_EVENT_DEADLINE_S, until_ns)
            while not opened.query():
                if time.monotonic() > deadline_s:
                    raise DeviceError("the engine's event did not happen in time")
                time.sleep(_EVENT_POLL_S)
            opened.wait(self._stream)
            self._awaited = opened  # kept until the stream has passed it
        if _left_s(1.0, until_ns) <= 0:
            raise DeviceError("the engine has its blocks back: it was too late to touch them")


class PinnedMemory:
    """Host memory that GPUs copy to and from directly, until `close`."""

    def __init__(self, address: int, device: torch.device) -> None:
        self._address: int | None = address
        self._device = device

    def close(self) -> None:
        """Unpin. Idempotent. The memory must still be mapped, and no copy in progress on it.

        Raises:
            DeviceError: CUDA would not, or did not in time: it waits for a GPU that hangs. The end
                of the process unpins too.
        """
        address, self._address = self._address, None
        if address is None:
            return
        codes: list[int] = []

        def unpin() -> None:
            with torch.cuda.device(self._device):
                codes.append(int(torch.cuda.cudart().cudaHostUnregister(address)))

        thread = threading.Thread(target=unpin, name="lmcache-redis-unpin", daemon=True)
        thread.start()
        thread.join(_UNPIN_DEADLINE_S)
        if codes != [0]:
            reason = f"CUDA error {codes[0]}" if codes else "CUDA did not answer in time"
            raise DeviceError(f"host memory could not be unpinned: {reason}")


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


def _left_s(most_s: float, until_ns: int | None) -> float:
    """How long to wait: ``most_s``, or until ``until_ns`` if that is sooner."""
    if until_ns is None:
        return most_s
    return min(most_s, (until_ns - time.monotonic_ns()) / 1e9)


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
