"""The GPUs of the agent: a context, streams with buffers, and kernels, shared by all workers.

Every call has a stream of its own, with staging for its chunks. Gathers and scatters have separate
streams, as many each as there are copy threads, so a gather that waits for its engine does not
delay a scatter. Streams and staging exist while a worker has memory on the GPU. The context stays
until the process ends: making one takes a fraction of a second.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver, kernels
from lmcache_redis.device.bus import Bus, BusCopies, PiecesOf, nothing_pinned
from lmcache_redis.errors import DeviceError, DriverError, GpuLost

DIRECT_COPY_BYTES = 64 << 10

_Int64s = npt.NDArray[np.int64]
_Pool = queue.LifoQueue["CopyStream"]


class Gpus:
    """The GPUs that this process sees. Thread-safe.

    Attributes:
        streams: of each GPU and direction.
        direct_copy_bytes: pages of so many bytes and more are copied without a kernel.
        pieces_of: as in `lmcache_redis.device.bus`.
    """

    def __init__(
        self,
        streams: int = 2,
        direct_copy_bytes: int = DIRECT_COPY_BYTES,
        pieces_of: PiecesOf = nothing_pinned,
    ) -> None:
        self.streams = streams
        self.direct_copy_bytes = direct_copy_bytes
        self.pieces_of = pieces_of
        self._lock = threading.Lock()
        self._found: dict[int, Gpu] = {}

    def at(self, uuid: str) -> Gpu:
        """The GPU with a UUID. Raises DeviceError if it is not visible here."""
        visible = driver.device_uuids()
        if uuid not in visible:
            raise DeviceError(
                f"GPU {uuid} is not visible here (visible: {', '.join(visible) or 'none'}): add it "
                "to the agent's CUDA_VISIBLE_DEVICES or container"
            )
        ordinal = visible.index(uuid)
        with self._lock:
            if ordinal not in self._found:
                self._found[ordinal] = Gpu(ordinal, uuid, self)
            return self._found[ordinal]


class Gpu:
    """One GPU. Thread-safe.

    ``attach`` comes before all else, and ``detach`` once for each.
    """

    def __init__(self, ordinal: int, uuid: str, settings: Gpus) -> None:
        self.ordinal = ordinal
        self.uuid = uuid
        self._settings = settings
        self._lock = threading.Lock()  # of this GPU alone: one that hangs delays no other
        self._context = 0
        self._workers = 0
        self._kernels: dict[str, int] = {}
        self._gathers: _Pool = queue.LifoQueue()
        self._scatters: _Pool = queue.LifoQueue()

    @property
    def direct_copy_bytes(self) -> int:
        return self._settings.direct_copy_bytes

    def attach(self) -> None:
        """A worker begins to use the GPU. Its context is current on this thread afterwards.

        Raises DeviceError if the GPU cannot be used, or has no memory for a context.
        """
        with self._lock:
            if not self._context:
                self._context = driver.retain_context(self.ordinal)
            self.use()
            if not self._workers:
                most_pitch = driver.device_attribute(self.ordinal, driver.Attribute.MAX_PITCH)
                bus = Bus(most_pitch, self._settings.pieces_of)
                try:
                    for pool in (self._gathers, self._scatters):
                        for _ in range(self._settings.streams):
                            pool.put(CopyStream(bus))
                except DriverError:
                    self._close_streams()
                    raise
            self._workers += 1

    def detach(self) -> None:
        """A worker has ended its calls. The last one frees streams and staging."""
        with self._lock:
            self._workers -= 1
            if not self._workers:
                self.use()
                self._close_streams()

    def use(self) -> None:
        """Make its context that of this thread."""
        driver.set_context(self._context)

    def kernel(self, name: str) -> int:
        """A function of `lmcache_redis.device.kernels`, compiled at its first use."""
        with self._lock:
            if name not in self._kernels:
                module = driver.load_module(kernels.text(name) + b"\0")
                self._kernels[name] = driver.function_of(module, name)
            return self._kernels[name]

    @contextmanager
    def stream(self, *, scatter: bool, wait_s: float) -> Iterator[CopyStream]:
        """A stream for one call; the context is current.

        Raises DeviceError if none is free in time. Nothing is in flight on it when this ends.
        """
        pool = self._scatters if scatter else self._gathers
        try:
            stream = pool.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            raise DeviceError(
                f"no CUDA stream of GPU {self.uuid} was free within {wait_s:.1f} s"
            ) from None
        try:
            self.use()
            yield stream
        except BaseException:
            stream.drain()
            raise
        finally:
            pool.put(stream)

    def _close_streams(self) -> None:
        for pool in (self._gathers, self._scatters):
            while not pool.empty():
                pool.get_nowait().close()


class CopyStream:
    """A stream, and the buffers of the call that uses it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.number = driver.create_stream()
        self._kernel_ended = driver.create_event()
        self._drained = driver.create_event()
        self._staging = Buffer()
        self._ids = Buffer()
        self._sent = PinnedNumbers()

    def staging(self, size_bytes: int) -> int:
        """The address of so many bytes on the GPU, aligned to 256, for this call."""
        return self._staging.grown(size_bytes)

    def send(self, ids: _Int64s) -> int:
        """Enqueue numbers to the GPU; their address there. Once in a call."""
        there = self._ids.grown(ids.nbytes)
        here = self._sent.take(ids)
        driver.enqueue_copy_in(there, here, ids.nbytes, self.number)
        return there

    def copy_in(self, copies: BusCopies) -> None:
        """Enqueue copies from the host to the GPU, in no order."""
        self._bus.enqueue_in(copies, self.number)

    def copy_out(self, copies: BusCopies) -> None:
        """Enqueue copies from the GPU to the host, in no order."""
        self._bus.enqueue_out(copies, self.number)

    def mark_kernel(self) -> None:
        """What is enqueued so far is what `wait_for_kernel` waits for."""
        driver.record_event(self._kernel_ended, self.number)

    def wait_for_kernel(self) -> None:
        driver.wait_for(self._kernel_ended)

    def drain(self) -> None:
        """Wait, asleep, until nothing on the stream is in flight.

        Raises GpuLost if the driver refuses: slots and blocks may then still be in use, so this
        process must not go on.
        """
        try:
            driver.record_event(self._drained, self.number)
            driver.wait_for(self._drained)
        except GpuLost:
            raise
        except DriverError as error:
            raise GpuLost(error.code, f"it is not known which copies have ended: {error}") from None

    def close(self) -> None:
        """Nothing may be in flight."""
        self._staging.close()
        self._ids.close()
        self._sent.close()
        driver.destroy_event(self._kernel_ended)
        driver.destroy_event(self._drained)
        driver.destroy_stream(self.number)


class Buffer:
    """GPU memory that grows."""

    def __init__(self) -> None:
        self._address = 0
        self._size_bytes = 0

    def grown(self, size_bytes: int) -> int:
        """Its address, with room for so many bytes. Contents are lost if it grows."""
        if size_bytes > self._size_bytes:
            self.close()
            self._address = driver.allocate(size_bytes)
            self._size_bytes = size_bytes
        return self._address

    def close(self) -> None:
        address, self._address, self._size_bytes = self._address, 0, 0
        if address:
            driver.free(address)


class PinnedNumbers:
    """Pinned host memory that grows, for numbers that are on their way to the GPU."""

    def __init__(self) -> None:
        self._address = 0
        self._numbers: _Int64s = np.empty(0, dtype=np.int64)

    def take(self, numbers: _Int64s) -> int:
        """Copy numbers in; the address. The former ones must have arrived."""
        if numbers.size > self._numbers.size:
            self.close()
            self._address = driver.allocate_pinned(numbers.nbytes)
            memory = (ctypes.c_int64 * numbers.size).from_address(self._address)
            self._numbers = np.frombuffer(memory, dtype=np.int64)
        self._numbers[: numbers.size] = numbers.ravel()
        return self._address

    def close(self) -> None:
        address, self._address = self._address, 0
        self._numbers = np.empty(0, dtype=np.int64)
        if address:
            driver.free_pinned(address)
