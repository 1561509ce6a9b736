"""KV caches in GPU memory: gathered into contiguous staging there, copied to pinned slots.

Every call has a CUDA stream of its own, with staging for its chunks. A gather is one kernel that
reads the chunks' pages into staging, and then a copy to each slot; a scatter is the reverse. The
copies over the bus take tens of times as long as the kernel. Meanwhile the next call's kernel runs
on another stream, so two threads keep the bus busy. Gathers and scatters have separate streams: a
gather that waits for the engine must not delay a request's scatter.

What waits for what:

    the engine's event ──▶ kernel             on the stream; the host sees it before it enqueues
    kernel ──▶ copies to slots                on the stream (gather)
    kernel ──▶ the engine reuses its blocks   on the host (gather), during those copies
    copies to staging ──▶ kernel              on the stream (scatter); they precede the event
    the last of these ──▶ return              the host thread sleeps

The kernel is enqueued only after the host has seen the event, because enqueued work cannot be
cancelled: a scatter behind an event that happens after the deadline would write to blocks that the
engine has given to another request.

A gather calls ``on_blocks_read`` as soon as its kernel has ended, long before it returns: the bytes
are in staging from then on.

A call costs the host a fraction of a millisecond, whatever its size. So one call moves several
small chunks (`call_bytes`) in one launch. They fail or are late together.

The agent pins its arena once (`PinnedMemory`). Unpinned slots work, at the speed of pageable
memory. The agent makes no context on a GPU that no worker registered.
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

from lmcache_redis.device.calls import CopyCall, DeviceContext
from lmcache_redis.device.cuda_copies import page_copies
from lmcache_redis.device.cuda_ipc import CudaIPCWrapper
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import BlockIds, pack_ids, staging_stride_bytes
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import is_running

_EVENT_HANDLE_BYTES = 64  # sizeof(cudaIpcEventHandle_t)
_EVENT_DEADLINE_S = 30.0
_EVENT_POLL_S = 100e-6
_STREAM_DEADLINE_S = 60.0
_UNPIN_DEADLINE_S = 5.0
_STREAMS = 2  # concurrent gathers of one worker, and as many scatters; further calls wait
_CALL_BYTES = 32 << 20
_HOST_REGISTER_PORTABLE = 1

_Int64s = npt.NDArray[np.int64]
_Streams = queue.LifoQueue["_CopyStream"]


class CudaDevice(DeviceContext):
    """The agent's mapping of one worker's KV cache on one GPU.

    layouts: of the groups, as received; checked here against the sizes of the handles. handles:
    flat uint8 storages, one for each that the layouts' segments name. Raises DeviceError if a
    handle cannot be opened, or a layout exceeds its storages.
    """

    call_bytes = _CALL_BYTES
    on_host_cores = False

    def __init__(self, layouts: Sequence[KVLayout], handles: Sequence[CudaIPCHandle]) -> None:
        for layout in layouts:
            layout.check([handle.storage_size_bytes for handle in handles])
        if len({handle.device_uuid for handle in handles}) != 1:
            raise DeviceError("the storages of one worker's KV cache are on different GPUs")
        super().__init__(layouts)
        self._exporter = (handles[0].pid, handles[0].pid_start_time)
        self._storages = [open_flat(handle) for handle in handles]
        self.device = self._storages[0].device
        with torch.cuda.device(self.device):
            self._copies = [page_copies(layout, self._storages) for layout in layouts]
        self._gather_streams: _Streams = queue.LifoQueue()
        self._scatter_streams: _Streams = queue.LifoQueue()
        for _ in range(_STREAMS):
            self._gather_streams.put(_CopyStream(self.device))
            self._scatter_streams.put(_CopyStream(self.device))

    def _gather(self, call: CopyCall, on_blocks_read: Callable[[], None] | None) -> None:
        """Once the engine's event has happened."""
        ids = self._checked(call)
        with self._stream(self._gather_streams, call) as (stream, staging):
            sent = stream.send(ids)
            stream.after(call.event, call.until_ns)
            self._copies[call.group].gather(sent, staging)
            kernel = stream.mark()
            for part, slot in _stripes(staging, call):
                slot.copy_(part, non_blocking=True)
            if on_blocks_read is not None:
                kernel.synchronize()
                on_blocks_read()

    def _scatter(self, call: CopyCall) -> None:
        """Pages are written after the event."""
        ids = self._checked(call)
        with self._stream(self._scatter_streams, call) as (stream, staging):
            sent = stream.send(ids)
            for part, slot in _stripes(staging, call):
                part.copy_(slot, non_blocking=True)
            stream.after(call.event, call.until_ns)
            self._copies[call.group].scatter(sent, staging)

    def _unmap(self) -> None:
        """Free the staging memory too."""
        self._copies = []
        for streams in (self._gather_streams, self._scatter_streams):
            while not streams.empty():
                streams.get_nowait()
        with torch.cuda.device(self.device):
            # Dropping the storages closes their IPC handles and releases the engine's memory.
            self._storages.clear()
            torch.cuda.empty_cache()

    def _checked(self, call: CopyCall) -> _Int64s:
        """The ids as a kernel takes them. Raises DeviceError for an invalid argument."""
        ids = pack_ids(
            [chunk.block_ids for chunk in call.chunks],
            self.layouts[call.group].num_blocks,
            [chunk.skip_blocks for chunk in call.chunks],
        )
        if call.event is not None and len(call.event) != _EVENT_HANDLE_BYTES:
            raise DeviceError(f"a CUDA event handle of {len(call.event)} bytes")
        if not is_running(*self._exporter):
            raise DeviceError(f"process {self._exporter[0]}, whose KV cache this is, has ended")
        return ids

    @contextmanager
    def _stream(
        self, streams: _Streams, call: CopyCall
    ) -> Iterator[tuple[_CopyStream, torch.Tensor]]:
        """A stream, made current, with staging for the chunks. It is drained at the end."""
        with self._mapped():
            wait_s = _left_s(_STREAM_DEADLINE_S, call.until_ns)
            try:
                stream = streams.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                raise DeviceError(
                    f"no CUDA stream of {self.device} was free within {wait_s:.1f} s"
                ) from None
            try:
                with stream.running():
                    stride_bytes = staging_stride_bytes(call.chunk_bytes)
                    before_last = (len(call.chunks) - 1) * stride_bytes
                    yield stream, stream.staging(before_last + call.chunk_bytes)
            except RuntimeError as error:
                raise DeviceError(f"a copy on {self.device} failed: {error}") from error
            finally:
                streams.put(stream)


class _CopyStream:
    """One stream, and the buffers of the call that uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Blocking: a thread that waits for it sleeps. By default, CUDA's waits spin.
        self._drained = torch.cuda.Event(blocking=True)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._ids_host = torch.empty(0, dtype=torch.int64)
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._awaited: torch.cuda.Event | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the stream current. On exit, wait until nothing on it is in flight."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._drained.record(self._stream)
                self._drained.synchronize()
                self._awaited = None

    def mark(self) -> torch.cuda.Event:
        """An event after everything enqueued so far; a thread that waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def staging(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` on the GPU, aligned to 256."""
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes]

    def send(self, ids: _Int64s) -> BlockIds:
        """Copy the block ids to the GPU through pinned memory, so that the host does not wait."""
        if self._ids.numel() < ids.size:
            self._ids_host = torch.empty(ids.size, dtype=torch.int64, pin_memory=True)
            self._ids = torch.empty(ids.size, dtype=torch.int64, device=self._device)
        host = self._ids_host[: ids.size]
        host.numpy()[:] = ids.ravel()
        sent = self._ids[: ids.size]
        sent.copy_(host, non_blocking=True)
        return BlockIds(ids, sent.view(ids.shape))

    def after(self, event: bytes | None, until_ns: int | None) -> None:
        """Wait for the engine's event, and order what is enqueued from here on after it.

        Raises DeviceError if the event did not happen within the deadline, or the engine may reuse
        its blocks. Nothing on the stream waits for the event.
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
            raise DeviceError("the lease on the blocks has expired before the copy")


class PinnedMemory:
    """Page-aligned host memory that every GPU copies to and from directly, until `close`.

    Pinning takes seconds, so the whole arena is pinned once.

    device: a GPU that is already in use, because pinning makes a context on the current GPU. Raises
    DeviceError if the memory cannot be locked.
    """

    def __init__(self, address: int, size_bytes: int, device: torch.device) -> None:
        self._address: int | None = address
        self._device = device
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE))
        if code:
            raise DeviceError(
                f"{size_bytes} bytes of host memory could not be pinned (CUDA error {code}): raise "
                "the limit of locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1), "
                "or set a smaller host pool; copies work without it, at a fraction of the speed"
            )

    def close(self) -> None:
        """Unpin. Idempotent. The memory must still be mapped, with no copy in progress on it.

        Raises DeviceError if CUDA refused, or did not answer in time because a GPU hangs. The
        memory is then unpinned when the process ends.
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


def _stripes(staging: torch.Tensor, call: CopyCall) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each stripe of the staged chunks with its slot, as tensors of one length."""
    staged = staging.split(staging_stride_bytes(call.chunk_bytes))
    for chunk, whole in zip(call.chunks, staged, strict=True):
        parts = whole[: call.chunk_bytes].split(call.stripe_payload_bytes)
        for part, slot in zip(parts, chunk.slots, strict=True):
            yield part, torch.frombuffer(slot, dtype=torch.uint8, count=part.numel())


def _left_s(most_s: float, until_ns: int | None) -> float:
    """Seconds from now until ``until_ns``, at most ``most_s``."""
    if until_ns is None:
        return most_s
    return min(most_s, (until_ns - time.monotonic_ns()) / 1e9)


def open_flat(handle: CudaIPCHandle) -> torch.Tensor:
    """A storage as a flat uint8 tensor of exactly its size."""
    if handle.dtype != "uint8" or handle.shape != (handle.storage_size_bytes,):
        raise DeviceError(
            f"a KV cache storage of {handle.storage_size_bytes} bytes is registered as "
            f"{list(handle.shape)} {handle.dtype}: storages are flat uint8"
        )
    return CudaIPCWrapper.from_handle(handle).to_tensor()
