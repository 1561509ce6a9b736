"""Copies between host memory and a GPU, before they are enqueued.

Neighbours are merged. Host memory is pinned in pieces, and no copy crosses from one to the next: a
slot lies in one piece, but a merged copy might not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.device import driver

UNPINNED = -1

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


def enqueue_each(copies: BusCopies, stream: int, *, inward: bool) -> None:
    """In a submission each."""
    host, device, nbytes = (column.tolist() for column in copies)
    for address, there, size in zip(host, device, nbytes, strict=True):
        if inward:
            driver.enqueue_copy_in(there, address, size, stream)
        else:
            driver.enqueue_copy_out(address, there, size, stream)
