"""Copies between host memory and a GPU: all of a call in as few submissions as the driver allows.

    cuMemcpyBatchAsync    one submission (CUDA 12.8)
    cuMemcpy2DAsync       one for each run of equally long copies at equal distances on both sides
    a copy each           for what is left, and for host memory that is not pinned

Neighbours are merged before. Host memory is pinned in pieces, and no copy crosses from one to the
next: a slot lies in one piece, but a merged copy or a run of rows might not.
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

    def pick(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> BusCopies:
        return BusCopies(self.host[index], self.device[index], self.nbytes[index])


class Rows(NamedTuple):
    """``count`` copies of ``nbytes`` bytes; addresses grow by the pitches."""

    host: int
    host_pitch: int
    device: int
    device_pitch: int
    nbytes: int
    count: int


def nothing_pinned(addresses: _Int64s) -> _Int64s:
    return np.full(len(addresses), UNPINNED, dtype=np.int64)


def merged(copies: BusCopies, pieces: _Int64s) -> tuple[BusCopies, _Int64s]:
    """Adjacent copies as one if they are adjacent on both sides, within a pinned piece.

    Returns the copies with the piece of each. What is not pinned stays apart, because a part of it
    may be pinned by the time it is copied.
    """
    if len(pieces) < 2:
        return copies, pieces
    host, device, nbytes = copies
    follows = host[1:] == host[:-1] + nbytes[:-1]
    follows &= device[1:] == device[:-1] + nbytes[:-1]
    follows &= (pieces[1:] == pieces[:-1]) & (pieces[1:] != UNPINNED)
    if not follows.any():
        return copies, pieces
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    whole = BusCopies(host[first], device[first], np.add.reduceat(nbytes, first))
    return whole, pieces[first]


def rows_of(copies: BusCopies, pieces: _Int64s, most_pitch: int) -> list[Rows]:
    """Pinned copies in order, as few rows as possible: a run has one length, spacing and piece.

    most_pitch: of the GPU. What fits no run is a row by itself, with pitches of its own length.
    """
    host, device, nbytes = copies
    steps = np.diff(host), np.diff(device)
    joins = (nbytes[1:] == nbytes[:-1]) & (pieces[1:] == pieces[:-1])
    for step in steps:
        joins &= (step >= nbytes[:-1]) & (step <= most_pitch)
    host_steps, device_steps = (step.tolist() for step in steps)
    hosts, devices, sizes = host.tolist(), device.tolist(), nbytes.tolist()
    found: list[Rows] = []
    first = 0
    while first < len(sizes):
        size = sizes[first]
        pitches = (size, size)
        last = first
        if last < len(joins) and joins[last]:
            pitches = (host_steps[last], device_steps[last])
        while (
            last < len(joins) and joins[last] and (host_steps[last], device_steps[last]) == pitches
        ):
            last += 1
        count = last - first + 1
        found.append(Rows(hosts[first], pitches[0], devices[first], pitches[1], size, count))
        first = last + 1
    return found


class Bus:
    """Enqueues copies of one GPU, whose context is that of the calling thread. Thread-safe.

    pieces_of: which host memory is pinned. It may be pinned between the question and the copy, but
    not unpinned.
    """

    def __init__(self, most_pitch: int, pieces_of: PiecesOf = nothing_pinned) -> None:
        self._most_pitch = most_pitch
        self._pieces_of = pieces_of
        self._has_batch = driver.has("cuMemcpyBatchAsync")

    def enqueue_in(self, copies: BusCopies, stream: int) -> None:
        """From the host to the GPU."""
        self._enqueue(copies, stream, inward=True)

    def enqueue_out(self, copies: BusCopies, stream: int) -> None:
        """From the GPU to the host."""
        self._enqueue(copies, stream, inward=False)

    def _enqueue(self, copies: BusCopies, stream: int, *, inward: bool) -> None:
        pieces = self._pieces_of(copies.host)
        pinned = pieces != UNPINNED
        if not pinned.all():
            _enqueue_each(copies.pick(~pinned), stream, inward=inward)
            copies, pieces = copies.pick(pinned), pieces[pinned]
        copies, pieces = merged(copies, pieces)
        if len(pieces) == 1:
            _enqueue_each(copies, stream, inward=inward)
        elif len(pieces) and not self._enqueue_batch(copies, stream, inward=inward):
            for each in rows_of(copies, pieces, self._most_pitch):
                _enqueue_rows(each, stream, inward=inward)

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


def _enqueue_rows(rows: Rows, stream: int, *, inward: bool) -> None:
    host, device = (rows.host, rows.host_pitch), (rows.device, rows.device_pitch)
    if rows.count == 1 and inward:
        driver.enqueue_copy_in(rows.device, rows.host, rows.nbytes, stream)
    elif rows.count == 1:
        driver.enqueue_copy_out(rows.host, rows.device, rows.nbytes, stream)
    elif inward:
        driver.enqueue_copy_2d(*device, *host, rows.nbytes, rows.count, stream)
    else:
        driver.enqueue_copy_2d(*host, *device, rows.nbytes, rows.count, stream)
