# SPDX-License-Identifier: Apache-2.0
"""The host pool, pinned piece by piece while it is used, so that GPUs copy to and from it directly.

The driver pins under locks of the whole node: for 0.1 to 0.35 s a GiB, CUDA calls of other
processes wait, those of the engines included. Some kernels (6.11 to 6.13) pin no more than 2 GiB at
once. So a thread pins pieces of 128 MiB, after the first engine on a GPU was answered, each when
its pages are present, and pauses after each for as long as it took. Slots that are not pinned work:
the driver copies them through a buffer of its own, at a fraction of the speed.

Pieces end on slots, because a copy must not cross from one registration to the next
(`PoolPinning.pieces_of`). The first piece that cannot be pinned is the last one tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver
from lmcache_redis.device.gpu import UNPINNED
from lmcache_redis.errors import DeviceError, DriverError, GpuLost
from lmcache_redis.native.madvise import fault_in
from lmcache_redis.processes import NamedThread

logger = logging.getLogger(__name__)

_PIECE_BYTES = 128 << 20
_PREFAULT_POLL_S = 0.05
_UNPIN_DEADLINE_S = 5.0


class PoolPinning:
    """Pins slots that lie one after the other. Thread-safe.

    address, slots, slot_stride_bytes: of the pool, in whole pages. prefaulted_bytes: how many of
    its bytes are present, from the start on; a piece waits for them. on_lost: called on the thread
    that pins if the GPU is lost.
    """

    def __init__(
        self,
        address: int,
        slots: int,
        slot_stride_bytes: int,
        prefaulted_bytes: Callable[[], int],
        on_lost: Callable[[GpuLost], None],
    ) -> None:
        self._address = address
        self._end = address + slots * slot_stride_bytes
        self._piece_bytes = max(1, _PIECE_BYTES // slot_stride_bytes) * slot_stride_bytes
        self._prefaulted_bytes = prefaulted_bytes
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._keep = False  # what is pinned when it stops
        self.pinned_bytes = 0  # from the start of the pool on
        self.failure = ""  # why the rest is not pinned

    def pieces_of(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of the piece of each slot's address; -1 if it is not pinned."""
        offsets = addresses - self._address
        pinned = (offsets >= 0) & (offsets < self.pinned_bytes)
        return np.where(pinned, offsets // self._piece_bytes, UNPINNED)

    def begin(self, use_context: Callable[[], None]) -> None:
        """Begin to pin, for all GPUs. Later calls do nothing.

        use_context: makes the context of a GPU current on the calling thread.
        """
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = NamedThread("lmcache-redis-pin", self._run, (use_context,))
                self._thread.start()

    def close(self, *, unpin: bool = True) -> None:
        """Stop, and unpin piece by piece. Idempotent.

        unpin: with it, no copy may be in progress, and the memory is still mapped. Without it, all
        stays pinned until the process ends. Raises DeviceError if the driver refuses, or does not
        answer in time because a GPU hangs; what is left is then unpinned when the process ends.
        """
        with self._lock:
            self._keep = self._keep or not unpin
            self._stop.set()
        if self._thread is None:
            return
        self._thread.join(_UNPIN_DEADLINE_S)
        if self._thread.is_alive():
            raise DeviceError(f"the driver has not answered within {_UNPIN_DEADLINE_S:g} s")
        if self.pinned_bytes and not self._keep:
            raise DeviceError(self.failure)

    def _run(self, use_context: Callable[[], None]) -> None:
        try:
            use_context()
            self._pin()
            self._stop.wait()
            if not self._keep:
                self._unpin()
        except GpuLost as error:
            self.failure = str(error)
            self._on_lost(error)
        except DeviceError as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = f"an internal error: {error}"
            logger.exception("the host pool is not pinned any further")  # our own bug

    def _pin(self) -> None:
        """Until all is pinned, a piece cannot be, or `close`."""
        address = self._address
        while address < self._end:
            end = min(address + self._piece_bytes, self._end)
            # The thread that faults in the pool goes first.
            while not self._stop.is_set() and self._prefaulted_bytes() < end - self._address:
                self._stop.wait(_PREFAULT_POLL_S)
            if self._stop.is_set():
                return
            started_s = time.monotonic()
            try:
                fault_in(address, end - address, for_write=True)
                driver.pin(address, end - address)
            except (DriverError, MemoryError) as error:
                logger.warning(
                    "%d of %d MiB of the host pool are pinned, and the rest is copied at a "
                    "fraction of the speed: %s",
                    self.pinned_bytes >> 20, (self._end - self._address) >> 20, error,
                )  # fmt: skip
                self.failure = str(error)
                return
            self.pinned_bytes += end - address
            address = end
            self._stop.wait(time.monotonic() - started_s)

    def _unpin(self) -> None:
        """Unpins all pieces, the last first. Raises DriverError."""
        while self.pinned_bytes:
            begin = (self.pinned_bytes - 1) // self._piece_bytes * self._piece_bytes
            driver.unpin(self._address + begin)
            self.pinned_bytes = begin
