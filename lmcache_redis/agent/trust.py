"""Whether what is cached may be loaded: what canaries have found, by layout and epoch.

A layout is distrusted in the epoch in which a canary has found other KV than was cached. It is
trusted again after `CANARIES_AGAIN` canaries in a row without a difference, or when an operator
says so (`lmcache-redis trust`). Another epoch is trusted as any. Owned by the loop thread; a new
process knows nothing of what the former one has found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmcache_redis.messages import EPOCH_BYTES, HASH_BYTES_OF_AN_EPOCH

CANARIES_AGAIN = 100
# The one that is distrusted for the longest time gives way: its epoch has most likely ended.
_MOST = 4096

Distrusted = tuple[bytes, bytes]  # fingerprint, epoch


class LayoutTrust:
    """See the module. A hash is that of any chunk of the epoch."""

    def __init__(self) -> None:
        self._agreed: dict[Distrusted, int] = {}  # canaries in a row, of those distrusted

    def allows(self, fingerprints: Iterable[bytes], chunk_hash: bytes) -> bool:
        """Whether chunks with parts of these layouts may be loaded."""
        if not self._agreed:
            return True
        epoch = epoch_of(chunk_hash)
        return all((each, epoch) not in self._agreed for each in fingerprints)

    def differed(self, fingerprint: bytes, chunk_hash: bytes) -> bool:
        """A canary has found a difference. Returns whether the layout was trusted before."""
        found = (fingerprint, epoch_of(chunk_hash))
        was_trusted = found not in self._agreed
        if was_trusted and len(self._agreed) >= _MOST:
            del self._agreed[next(iter(self._agreed))]
        self._agreed[found] = 0
        return was_trusted

    def agreed(self, fingerprint: bytes, chunk_hash: bytes) -> bool:
        """A canary has found none. Returns whether the layout is trusted from now on."""
        found = (fingerprint, epoch_of(chunk_hash))
        if found not in self._agreed:
            return False
        self._agreed[found] += 1
        if self._agreed[found] < CANARIES_AGAIN:
            return False
        del self._agreed[found]
        return True

    def restore(self) -> int:
        """Trusts everything again; returns how many layouts were distrusted."""
        count = len(self._agreed)
        self._agreed.clear()
        return count

    def report(self) -> list[dict[str, Any]]:
        """What is distrusted, for STATUS."""
        return [
            {"layout": fingerprint.hex(), "epoch": epoch.hex(), "agreed": count}
            for (fingerprint, epoch), count in self._agreed.items()
        ]


def epoch_of(chunk_hash: bytes) -> bytes:
    """What a name begins with, before its adapter's digest and its block hash."""
    rest = len(chunk_hash) - EPOCH_BYTES
    return chunk_hash[:EPOCH_BYTES] if rest in HASH_BYTES_OF_AN_EPOCH else b""
