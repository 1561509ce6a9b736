"""What stands in Redis about the chunks of the remote tier: their keys, headers and removal.

Chunks are stripes as in docs/value-format.md, in a namespace of this tier. The metadata in a
header says what a chunk is, so there is one fingerprint for all; with the fingerprint of an
engine's layout the chunks are those that agents keep of it. Each call waits for the answers of the
data plane.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from lmcache_redis.keys import ObjectKey, stripe_key
from lmcache_redis.naming import ChunkNames
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.resp import CallOutcome, RedisPlane
from lmcache_redis.resp.outcomes import DescribeResult, ExistsResult, KeysResult, RemoveResult
from lmcache_redis.resp.wire import escape_pattern
from lmcache_redis.stripe import ChunkFrame, StripeHeader, stripe_payload_bytes

logger = logging.getLogger(__name__)

_FIRST_INDEX = stripe_key(b"", 0)


class Catalog:
    """Thread-safe. prefix: before every key. slot_bytes: most payload of a stripe we write.

    layout: see the module; None: chunks of this tier's own. No call raises for what the servers
    answer, or do not.
    """

    def __init__(
        self, plane: RedisPlane, prefix: bytes, slot_bytes: int, layout: bytes | None = None
    ) -> None:
        self._plane = plane
        self._slot_bytes = slot_bytes
        self._names = ChunkNames(layout, prefix)

    # ------------------------------------------------------------------ names

    def chunk_key(self, key: ObjectKey) -> bytes:
        """The key of a chunk's stripes, without the index."""
        return self._names.chunk_key(key)

    def first_key(self, key: ObjectKey) -> bytes:
        """The key of its stripe 0."""
        return stripe_key(self.chunk_key(key), 0)

    def frame(self, key: ObjectKey, metadata: RemoteMetadata) -> ChunkFrame:
        """A chunk as it is written here. Raises FormatError for one that cannot be."""
        stripe_bytes = stripe_payload_bytes(metadata.length, self._slot_bytes)
        return self._names.frame(key, metadata, stripe_bytes)

    # -------------------------------------------------------------- questions

    def contains(self, key: ObjectKey, deadline: float) -> bool:
        """Whether stripe 0 is there, which is written last."""
        names = [self.first_key(key)]
        found: ExistsResult = _wait(self._plane.exists, names, deadline)
        return any(found.present)

    def find(self, keys: Sequence[ObjectKey], deadline: float) -> list[ChunkFrame | None]:
        """Each chunk as it was cut by its writer, and None where there is none of ours."""
        names = [self.first_key(key) for key in keys]
        found: DescribeResult = _wait(self._plane.describe, names, deadline)
        headers = found.headers or [None] * len(keys)
        return [self._found(key, header) for key, header in zip(keys, headers, strict=True)]

    def remove(self, key: ObjectKey, deadline: float) -> bool:
        """Remove a chunk, or whatever is in its place; whether there was something.

        Stripe 0 first: without it no reader finds the chunk. False also if no server answered.
        """
        chunk_key, names = self.chunk_key(key), [self.first_key(key)]
        found: DescribeResult = _wait(self._plane.describe, names, deadline)
        if found.outcome is not CallOutcome.DONE:
            self._check(found.outcome, "a chunk could not be removed")
            return False
        (header,) = found.headers
        count = header.stripe_count if header is not None else 1
        removal: RemoveResult = _wait(self._plane.remove, chunk_key, count, deadline)
        self._check(removal.outcome, "a chunk could not be removed")
        return removal.removed > 0

    def keys(self, deadline: float) -> Iterator[ObjectKey]:
        """The keys of all chunks, some of them twice: SCANs of the whole database.

        Where a server does not answer until then some are missing, with a line in the log.
        """
        pattern = escape_pattern(self._names.common) + b"*" + _FIRST_INDEX
        found: KeysResult = _wait(self._plane.keys, pattern, deadline)
        self._check(found.outcome, "the list of chunks is not complete")
        for name in found.names:
            # Whatever the server matched: names are read here.
            key = self._names.parse(name.removesuffix(_FIRST_INDEX))
            if key is not None and name.endswith(_FIRST_INDEX):
                yield key

    def _check(self, outcome: CallOutcome, what: str) -> None:
        if outcome is not CallOutcome.DONE:
            logger.warning("%s: %s (%s)", what, outcome.value, self._plane.where)

    def _found(self, key: ObjectKey, header: StripeHeader | None) -> ChunkFrame | None:
        if header is None or header.stripe_index != 0:
            return None
        if header.fingerprint != self._names.fingerprint or header.chunk_hash != key.chunk_hash:
            return None
        # Stripe 0 is as large as any.
        return self._names.frame(key, header.metadata, header.payload_bytes)


def _wait(call: Callable[..., None], *arguments: Any) -> Any:
    """The answer to a call of the plane, which comes by the call's deadline."""
    results: SimpleQueue[Any] = SimpleQueue()
    call(*arguments, results.put)
    return results.get()
