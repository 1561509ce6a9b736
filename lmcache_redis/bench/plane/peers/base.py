"""What every client can do: a value is prepared without the clock, then moved under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmcache_redis.bench.plane.values import Values


class Client(ABC):
    """One client at one setting. Raises whatever goes wrong: its process ends by it.

    brings_values: a load brings back what was stored, and can be checked.
    """

    brings_values = True

    @abstractmethod
    def prepare(self, name: str, values: Values) -> None:
        """Makes the keys for the stores and loads that follow."""

    @abstractmethod
    def store(self, fresh: bool) -> None:
        """Stores all prepared values; on return the server has acknowledged them."""

    @abstractmethod
    def load(self) -> None:
        """Loads all prepared values into their memory."""

    @abstractmethod
    def close(self) -> None:
        """Ends its connections and threads."""


class ScanningClient(Client):
    """A client that can tell which keys exist."""

    @abstractmethod
    def prepare_scan(self, count: int) -> Sequence[bytes]:
        """Makes the keys for the scans that follow; gives them as the server knows them."""

    @abstractmethod
    def scan(self) -> int:
        """How many of the keys exist, from the first on without a gap."""


def whole_values(name: str, values: Values) -> list[tuple[str, memoryview]]:
    """Keys and values of peers: each value under one key, as LMCache stores its chunks."""
    stem = f"bench@{values.value_bytes}@{name}@"
    return [(f"{stem}{number:032x}", slots[0]) for number, slots in enumerate(values.slots)]


def text_keys(count: int) -> list[str]:
    """Keys about as long as those of LMCache."""
    return [f"bench/scan@1@0@{number:064x}" for number in range(count)]


def prefix_length(present: Sequence[object]) -> int:
    """How many are true from the first on."""
    return next((n for n, found in enumerate(present) if not found), len(present))


class Threads:
    """Work split between threads: thread n takes every so-manieth item from the n-th on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count)

    def run(self, work: Callable[[int, Iterator[int]], None], items: int) -> None:
        """Calls ``work`` with the number of a thread and its items; raises what it raises."""
        shares = [iter(range(n, items, self._count)) for n in range(self._count)]
        for _ in self._pool.map(work, range(self._count), shares):
            pass

    def close(self) -> None:
        self._pool.shutdown()
