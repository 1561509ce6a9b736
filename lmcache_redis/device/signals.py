# SPDX-License-Identifier: Apache-2.0
"""How an engine on a GPU tells the agent that its queued work has come to a certain place.

A page of host memory that both processes map holds 64-bit slots. The engine takes a *ticket*, the
next number, and enqueues on its stream that the GPU writes the ticket to slot ``ticket % SLOTS``.
The write follows all earlier work of the stream, which is then visible to every processor
(``cuStreamWriteValue64`` fences). The agent reads the slot, without a call to CUDA: the place is
reached when the slot holds the ticket or a later one.

A slot is used again only after its last ticket was written. So a later number in it proves the
earlier one, on whichever streams they were.

CUDA's interprocess events would need a common ``/dev/shm`` (one IPC namespace), 30 µs to open each,
and an engine that keeps each until the agent has passed it; operating on a destroyed one is
undefined.

Source: "Stream Memory Operations" in the CUDA driver API.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading

import numpy as np

from lmcache_redis.device import driver
from lmcache_redis.device.cpu import SharedMapping
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.errors import DeviceError
from lmcache_redis.native.madvise import address_of

SLOTS = 512
_SLOT_BYTES = 8
_PAGE_BYTES = SLOTS * _SLOT_BYTES


class Signals:
    """The engine's side, for the GPU with this number. Thread-safe.

    There is one for each GPU of a process (`signals_of`), which lives as long as the process:
    the GPU may write to the page at any time. Raises DeviceError if the GPU cannot write values.
    """

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        if not driver.device_attribute(driver.Attribute.WRITES_64_BIT_VALUES, gpu):
            raise DeviceError(
                f"{driver.device_name(gpu)} with this driver does not write 64-bit values from "
                "a stream (cuStreamWriteValue64), by which the engine tells the agent that blocks "
                "are ready: a driver from 525 on, without vGPU or WSL, does"
            )
        fd = os.memfd_create("lmcache-redis-signals", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        self._memory = mmap.mmap(fd, _PAGE_BYTES)
        address = address_of(self._memory)
        self._context = driver.retain_context(gpu)
        with driver.in_context(self._context):
            driver.pin(address, _PAGE_BYTES)
            self._address = driver.device_address(address)
        self._lock = threading.Lock()
        self._slots = np.frombuffer(self._memory, dtype=np.uint64)
        self._last = 0
        self.handle = SharedMemoryHandle.of(fd, _PAGE_BYTES)

    def record(self, stream: int) -> int:
        """A ticket for the place at the end of the queue of a stream of this GPU.

        Raises DeviceError if the GPU is 512 tickets behind, which means that it hangs.
        """
        with self._lock, driver.in_context(self._context):
            ticket = self._last + 1
            slot = ticket % SLOTS
            if ticket > SLOTS and int(self._slots[slot]) != ticket - SLOTS:
                raise DeviceError(f"the GPU has not reached the last {SLOTS} signals: it hangs")
            driver.write_value(stream, self._address + slot * _SLOT_BYTES, ticket)
            self._last = ticket
        return ticket


@functools.cache
def signals_of(gpu: int) -> Signals:
    """The signals of a GPU of this process. Raises DeviceError as `Signals` does."""
    return Signals(gpu)


class SignalPage:
    """The agent's side: reads an engine's page. Thread-safe.

    Raises DeviceError if the memory of the handle cannot be mapped.
    """

    def __init__(self, handle: SharedMemoryHandle) -> None:
        if handle.size_bytes != _PAGE_BYTES:
            raise DeviceError(f"a page of signals has {handle.size_bytes} bytes, not {_PAGE_BYTES}")
        self._mapping = SharedMapping(handle)
        self._slots: np.ndarray | None = np.frombuffer(self._mapping.memory, dtype=np.uint64)

    def has_happened(self, ticket: int) -> bool:
        """Whether the engine's GPU has reached the place of a ticket."""
        slots = self._slots
        if slots is None:
            raise DeviceError("the page of signals is no longer mapped")
        return int(slots[ticket % SLOTS]) >= ticket

    def close(self) -> None:
        """Unmap. No call may be in progress. Idempotent."""
        slots, self._slots = self._slots, None
        if slots is not None:
            del slots
            self._mapping.close()
