# SPDX-License-Identifier: Apache-2.0
"""The GPUs of the agent: a context, streams with buffers, and kernels, shared by all workers.

Every call has a stream of its own, with staging for its chunks, so a gather that waits for its
engine does not delay a scatter. There are as many as calls at once, which the agent's copy threads
bound, and they exist while a worker has memory on the GPU. The context stays until the process
ends: making one takes a fraction of a second.

Neighbouring copies are merged before they are enqueued. Host memory is pinned in pieces, and no
copy crosses from one to the next: a slot lies in one piece, but a merged copy might not.

Many copies are a batch (`Batches`), which the driver takes in one call. Drivers have crashed and
hung over it, most of all over long ones (vLLM #49276), and have refused it with several errors. So
a batch is short, may be switched off, and is made again as single copies if it is refused.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver, kernels
from lmcache_redis.errors import DriverError, GpuLost

logger = logging.getLogger(__name__)

UNPINNED = -1
_BATCH_COPIES = 512
_LEAST_IDS_BYTES = 64 << 10

_Int64s = npt.NDArray[np.int64]
# For addresses of host memory, the number of the pinned piece that each lies in, or `UNPINNED`.
PiecesOf = Callable[[_Int64s], _Int64s]


class BusCopies(NamedTuple):
    """Copy ``i`` moves ``nbytes[i]`` between the addresses ``host[i]`` and ``device[i]``."""

    host: _Int64s
    device: _Int64s
    nbytes: _Int64s

    def pick(self, index: npt.NDArray[np.bool_]) -> BusCopies:
        return BusCopies(self.host[index], self.device[index], self.nbytes[index])


def merged(copies: BusCopies, pieces: _Int64s) -> BusCopies:
    """Adjacent copies as one if they are adjacent on both sides, within a pinned piece."""
    host, device, nbytes = copies
    follows = host[1:] == host[:-1] + nbytes[:-1]
    follows &= device[1:] == device[:-1] + nbytes[:-1]
    follows &= pieces[1:] == pieces[:-1]
    if not follows.any():
        return copies
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return BusCopies(host[first], device[first], np.add.reduceat(nbytes, first))


class Gpus:
    """The GPUs that this process sees. Thread-safe.

    direct_copy_bytes: pages of this size and more are copied without a kernel. pieces_of: which
    host memory is pinned. batch_copies: where driver and GPU can.
    """

    def __init__(
        self, direct_copy_bytes: int, pieces_of: PiecesOf, *, batch_copies: bool = True
    ) -> None:
        self._settings = (direct_copy_bytes, pieces_of, batch_copies)
        self._lock = threading.Lock()
        self._found: dict[int, Gpu] = {}

    def at(self, uuid: str) -> Gpu:
        """The GPU with a UUID. Raises DeviceError if it is not visible here."""
        ordinal = driver.ordinal_of(uuid)
        with self._lock:
            if ordinal not in self._found:
                self._found[ordinal] = Gpu(ordinal, *self._settings)
            return self._found[ordinal]


class Gpu:
    """One GPU. Thread-safe.

    ``attach`` comes before all else, and ``detach`` once for each.
    """

    def __init__(
        self, ordinal: int, direct_copy_bytes: int, pieces_of: PiecesOf, batch_copies: bool
    ) -> None:
        self.ordinal = ordinal
        self._batches = Batches(ordinal, batch_copies)
        self.direct_copy_bytes = direct_copy_bytes
        self._pieces_of = pieces_of
        self._lock = threading.Lock()  # of this GPU alone: one that hangs delays no other
        self._context = 0
        self._workers = 0
        self._kernels: dict[str, int] = {}
        self._free: list[CopyStream] = []

    def attach(self) -> None:
        """A worker begins to use the GPU. Its context is current on this thread afterwards.

        Raises DeviceError if the GPU cannot be used, or has no memory for a context.
        """
        with self._lock:
            if not self._context:
                self._context = driver.retain_context(self.ordinal)
            self.use()
            self._workers += 1

    def detach(self) -> None:
        """A worker has ended its calls. The last one frees streams and staging."""
        unused: list[CopyStream] = []
        with self._lock:
            self._workers -= 1
            if not self._workers:
                unused, self._free = self._free, []
        # Not under the lock: the driver may not return.
        if unused:
            self.use()
        while unused:
            unused.pop().close()

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
    def stream(self) -> Iterator[CopyStream]:
        """A stream for one call; the context is current.

        Nothing is in flight on it when this ends.
        """
        self.use()
        try:
            stream = self._free.pop()
        except IndexError:
            stream = CopyStream(self._pieces_of, self._batches)
        try:
            yield stream
        except BaseException:
            stream.drain()
            raise
        finally:
            self._free.append(stream)


class Batches:
    """Whether copies of a GPU are made in batches. Thread-safe.

    They are if they are ``wanted``, the driver has the call, and the addresses of pinned memory are
    the GPU's own: of a single copy the driver looks them up, of a batch it may not.
    """

    def __init__(self, ordinal: int, wanted: bool) -> None:
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self.on = (
            wanted
            and driver.has(driver.BATCHES)
            and bool(driver.device_attribute(driver.Attribute.SEES_HOST_ADDRESSES, ordinal))
        )

    def refused(self, error: DriverError) -> None:
        """A batch was, and its copies were made one by one: no other is made."""
        with self._lock:
            is_first, self.on = self.on, False
        if is_first:
            logger.warning(
                "GPU %d copies one by one from now on, as with --batch-copies off, because a batch "
                "was refused: %s", self._ordinal, error,
            )  # fmt: skip


class CopyStream:
    """A stream, and the buffers of the call that uses it.

    pieces_of: which host memory is pinned. It may be pinned between the question and the copy, but
    not unpinned. batches: of its GPU.
    """

    def __init__(self, pieces_of: PiecesOf, batches: Batches) -> None:
        self._pieces_of = pieces_of
        self._batches = batches
        self.staging = Buffer(driver.allocate, driver.free)
        self._ids = Buffer(driver.allocate, driver.free)
        self._sent = Buffer(driver.allocate_pinned, driver.free_pinned)
        with ExitStack() as made:
            self.number = driver.create_stream()
            made.callback(driver.destroy_stream, self.number)
            self._event = driver.create_event()
            made.callback(driver.destroy_event, self._event)
            for buffer in (self.staging, self._ids, self._sent):
                made.callback(buffer.close)
            self._made = made.pop_all()

    def send(self, ids: _Int64s) -> int:
        """Enqueue numbers to the GPU; their address there. Once in a call."""
        size_bytes = max(ids.nbytes, _LEAST_IDS_BYTES)
        there, sent = self._ids.grown(size_bytes), self._sent.grown(size_bytes)
        # Of pageable memory the driver may wait for the stream.
        ctypes.memmove(sent, ids.ctypes.data, ids.nbytes)
        driver.enqueue_copy_in(there, sent, ids.nbytes, self.number)
        return there

    def copy(self, copies: BusCopies, *, inward: bool) -> None:
        """Enqueue copies from the host to the GPU, or out of it, in no order.

        Those of pinned memory are made in batches, if the GPU takes them.
        """
        pieces = self._pieces_of(copies.host)
        pinned = pieces != UNPINNED
        if not pinned.all():
            # They stay apart, because a part of them may be pinned by the time it is copied.
            self._copy_each(copies.pick(~pinned), inward=inward)
            copies, pieces = copies.pick(pinned), pieces[pinned]
        copies = merged(copies, pieces)
        if len(copies.host) > 1 and self._batches.on:
            self._copy_batches(copies, inward=inward)
        else:
            self._copy_each(copies, inward=inward)

    def _copy_each(self, copies: BusCopies, *, inward: bool) -> None:
        for host, device, nbytes in zip(*(column.tolist() for column in copies), strict=True):
            if inward:
                driver.enqueue_copy_in(device, host, nbytes, self.number)
            else:
                driver.enqueue_copy_out(host, device, nbytes, self.number)

    def _copy_batches(self, copies: BusCopies, *, inward: bool) -> None:
        # Whole arrays of their own: the driver reads 64-bit numbers side by side.
        copies = BusCopies(*map(np.ascontiguousarray, copies))
        for first in range(0, len(copies.nbytes), _BATCH_COPIES):
            part = slice(first, first + _BATCH_COPIES)
            host, device, nbytes = (column[part] for column in copies)
            to, source = (device, host) if inward else (host, device)
            addresses = (to.ctypes.data, source.ctypes.data, nbytes.ctypes.data)
            try:
                driver.enqueue_copies(*addresses, len(nbytes), self.number)
            except DriverError as error:
                # Raises too if the copies are at fault. One that is made twice is the same twice.
                rest = BusCopies(*(column[first:] for column in copies))
                self._copy_each(rest, inward=inward)
                self._batches.refused(error)
                return

    def mark_kernel(self) -> None:
        """What is enqueued so far is what `wait_for_kernel` waits for."""
        driver.record_event(self._event, self.number)

    def wait_for_kernel(self) -> None:
        driver.wait_for(self._event)

    def drain(self) -> None:
        """Wait, asleep, until nothing on the stream is in flight.

        Raises GpuLost if the driver refuses: slots and blocks may then still be in use, so this
        process must not go on.
        """
        try:
            driver.record_event(self._event, self.number)
            driver.wait_for(self._event)
        except DriverError as error:
            raise GpuLost(error.code, f"it is not known which copies have ended: {error}") from None

    def close(self) -> None:
        """Nothing may be in flight."""
        self._made.close()


class Buffer:
    """Memory of the driver's that grows; of the GPU it is aligned to 256 bytes."""

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._free = free
        self._address = 0
        self._size_bytes = 0

    def grown(self, size_bytes: int) -> int:
        """Its address, with room for `size_bytes`. Contents are lost if it grows."""
        if size_bytes > self._size_bytes:
            self.close()
            self._address = self._allocate(size_bytes)
            self._size_bytes = size_bytes
        return self._address

    def close(self) -> None:
        address, self._address, self._size_bytes = self._address, 0, 0
        if address:
            self._free(address)
