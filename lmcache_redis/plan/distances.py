"""How large a cache must be for each access to hit.

LRU keeps what was used last, so a cache of some size holds all that a smaller one does. One pass
gives, for each access, the bytes of the different chunks used since the last access to the same one
(Mattson et al., 1970): a cache of at least so many bytes hits. Other policies have no such
order and are simulated for one size, by libCacheSim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_redis.errors import ConfigError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max  # the distance of a first access

# libCacheSim's names of them.
POLICIES = {
    "fifo": "FIFO",
    "lfu": "LFU",
    "arc": "ARC",
    "clock": "Clock",
    "lirs": "LIRS",
    "2q": "TwoQ",
    "slru": "SLRU",
    "s3fifo": "S3FIFO",
    "sieve": "Sieve",
    "wtinylfu": "WTinyLFU",
    "lfuda": "LFUDA",
    "gdsf": "GDSF",
}
_LEAST_HASH_POWER = 16
_CACHED_BITS = 14  # columns of so many elements fit a core's cache


def stack_distances(ids: Ints, weights: Ints) -> Ints:
    """For each access the bytes of an LRU cache that hits; `NEVER` for the first of a chunk.

    weights: bytes of each access's chunk, the same for all accesses of one. O(n log n).
    """
    before = previous_access(ids)
    distances = np.full(len(ids), NEVER, np.int64)
    again = np.flatnonzero(before >= 0)
    if not len(again):
        return distances
    # Of the accesses j between p = before[i] and i, those that are the first of their chunk there:
    # before[j] < p. All j <= p are such, so they are counted too, and subtracted.
    total = np.cumsum(weights)
    of_first = np.cumsum(np.where(before < 0, weights, 0))
    earlier = before[again]
    rank = np.empty(len(again), np.int64)
    rank[np.argsort(earlier)] = np.arange(len(again))
    of_others = _smaller_before(rank, weights[again])
    distances[again] = of_first[again] + of_others - total[earlier] + weights[again]
    return distances


def previous_access(ids: Ints) -> Ints:
    """The index of the last access to the same chunk; -1 for the first."""
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    before = np.full(len(ids), -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before


def _smaller_before(ranks: Ints, weights: Ints) -> Ints:
    """For each element the weights of the smaller ones that stand before it.

    ranks: a permutation of 0 to n - 1. A radix sort from the highest bit down, stable: elements
    with equal higher bits stand together, and half of them have the bit. Those that have not, and
    stand before one that has, are smaller. Halves are sorted one after the other, so that all but
    the first few steps work in the processor's caches.
    """
    count = len(ranks)
    bits = max(1, (count - 1).bit_length())
    values, weight = np.arange(1 << bits), np.zeros(1 << bits, np.int64)
    values[:count], weight[:count] = ranks, weights
    found = np.zeros(1 << bits, np.int64)
    _sort_halves(values, weight, found, bits - 1)
    return found[ranks]  # sorted by now


def _sort_halves(values: Ints, weight: Ints, found: Ints, bit: int) -> None:
    """Sorts the columns by the bits of ``values`` from this one down, in place."""
    while bit >= 0:
        if bit >= _CACHED_BITS:
            _sort_bit(values, weight, found, bit)
            half = 1 << bit
            _sort_halves(values[:half], weight[:half], found[:half], bit - 1)
            values, weight, found = values[half:], weight[half:], found[half:]
        else:
            _sort_bit(values, weight, found, bit)
        bit -= 1


def _sort_bit(values: Ints, weight: Ints, found: Ints, bit: int) -> None:
    half = 1 << bit
    has = (values & half).astype(bool)
    running = np.where(has, 0, weight).reshape(-1, 2 * half).cumsum(axis=1).reshape(-1)
    found += np.where(has, running, 0)
    for column in (values, weight, found):
        without, with_bit = column[~has], column[has]
        halves = column.reshape(-1, 2 * half)
        halves[:, :half] = without.reshape(-1, half)
        halves[:, half:] = with_bit.reshape(-1, half)


def hits_of(policy: str, ids: Ints, weights: Ints, capacity_bytes: int) -> Bools:
    """Which accesses hit in a cache of libCacheSim. Raises ``ConfigError`` if it is not there."""
    hits = np.zeros(len(ids), bool)
    if capacity_bytes <= 0 or not len(ids):
        return hits
    library, make = _library(policy)
    # Tables that fit the trace: the default one is for millions of objects.
    power = max(_LEAST_HASH_POWER, len(ids).bit_length() - 4)
    cache, request = make(int(capacity_bytes), hashpower=power), library.Request()
    get, rows = cache.get, zip(ids.tolist(), weights.tolist(), strict=True)
    for index, (request.obj_id, request.obj_size) in enumerate(rows):
        hits[index] = get(request)
    return hits


def _library(policy: str) -> tuple[Any, Callable[..., Any]]:
    try:
        import libcachesim
    except ImportError as error:
        raise ConfigError(
            f"--policy {policy} needs libCacheSim: run `pip install lmcache-redis[plan]`, or "
            "leave out all but lru"
        ) from error
    return libcachesim, getattr(libcachesim, POLICIES[policy])
