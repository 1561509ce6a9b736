"""Copies between host memory and a GPU: all of a call in as few submissions as the driver allows.

Those of pinned memory are one submission (``cuMemcpyBatchAsync``, CUDA 12.8). Others are enqueued
one by one, and so are all with an older driver. Neighbours are merged before. Host memory is pinned
in pieces, and no copy crosses from one to the next: a slot lies in one piece, but a merged copy
might not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver
from lmcache_redis.errors import DriverError

UNPINNED = -1
_NOT_SUPPORTED = 801

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


def nothing_pinned(addresses: _Int64s) -> _Int64s:
    return np.full(len(addresses), UNPINNED, dtype=np.int64)


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


class Bus:
    """Enqueues copies of one GPU, whose context is that of the calling thread. Thread-safe.

    pieces_of: which host memory is pinned. It may be pinned between the question and the copy, but
    not unpinned.
    """

    def __init__(self, pieces_of: PiecesOf = nothing_pinned) -> None:
        self._pieces_of = pieces_of
        self._has_batch = driver.has("cuMemcpyBatchAsync")

    def enqueue(self, copies: BusCopies, stream: int, *, inward: bool) -> None:
        """Copies from the host to the GPU, or from the GPU to the host, in no order."""
        pieces = self._pieces_of(copies.host)
        pinned = pieces != UNPINNED
        if not pinned.all():
            # They stay apart, because a part of them may be pinned by the time it is copied.
            _enqueue_each(copies.pick(~pinned), stream, inward=inward)
            copies, pieces = copies.pick(pinned), pieces[pinned]
        copies = merged(copies, pieces)
        if len(copies.host) < 2 or not self._enqueue_batch(copies, stream, inward=inward):
            _enqueue_each(copies, stream, inward=inward)

    def _enqueue_batch(self, copies: BusCopies, stream: int, *, inward: bool) -> bool:
        """False if this driver or GPU takes no batches: nothing was enqueued."""
        if not self._has_batch:
            return False
        # Whole arrays of their own: the driver reads 64-bit numbers side by side.
        host, device, nbytes = map(np.ascontiguousarray, copies)
        to, source = (device, host) if inward else (host, device)
        try:
            driver.enqueue_copies(
                to.ctypes.data, source.ctypes.data, nbytes.ctypes.data, len(nbytes), stream
            )
        except DriverError as error:
            if error.code != _NOT_SUPPORTED:
                raise
            self._has_batch = False
            return False
        return True


def _enqueue_each(copies: BusCopies, stream: int, *, inward: bool) -> None:
    host, device, nbytes = (column.tolist() for column in copies)
    for address, there, size in zip(host, device, nbytes, strict=True):
        if inward:
            driver.enqueue_copy_in(there, address, size, stream)
        else:
            driver.enqueue_copy_out(address, there, size, stream)
