"""What stands in Redis about the chunks of the remote tier: their keys, headers and removal.

Chunks are stripes as in docs/value-format.md, in a namespace of this tier. The metadata in a
header says what a chunk is, so there is one fingerprint for all; with the fingerprint of an
engine's layout the chunks are those that agents keep of it. Small questions only: payloads are
the data plane's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from lmcache_redis.errors import FormatError, RedisError
from lmcache_redis.keys import ObjectKey, stripe_key
from lmcache_redis.naming import ChunkNames
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.resp.commands import Answer, CommandClient, Question
from lmcache_redis.resp.query import header_command, unlink_command
from lmcache_redis.resp.wire import ErrorReply, error_of, escape_pattern
from lmcache_redis.stripe import (
    ChunkFrame,
    StripeHeader,
    describe_header,
    stripe_payload_bytes,
)

logger = logging.getLogger(__name__)

# One SCAN, one batch of removals: well under a millisecond of the server's.
_STEP_KEYS = 512
_FIRST_INDEX = stripe_key(b"", 0)


class Catalog:
    """Thread-safe. prefix: before every key. slot_bytes: most payload of a stripe we write.

    layout: see the module; None: chunks of this tier's own. No call raises for what the servers
    answer, or do not.
    """

    def __init__(
        self, client: CommandClient, prefix: bytes, slot_bytes: int, layout: bytes | None = None
    ) -> None:
        self._client = client
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

    def find(self, keys: Sequence[ObjectKey], deadline: float) -> list[ChunkFrame | None]:
        """Each chunk as it was cut by whoever wrote it, and None where there is none of ours."""
        questions = [_header_question(self.first_key(key)) for key in keys]
        answers = self._client.ask(questions, deadline)
        return [self._found(key, answer) for key, answer in zip(keys, answers, strict=True)]

    def remove(self, key: ObjectKey, deadline: float) -> bool:
        """Remove a chunk, or whatever is in its place; whether there was something.

        Stripe 0 first: without it no reader finds the chunk. False also if no server answered.
        """
        chunk_key, first = self.chunk_key(key), self.first_key(key)
        questions = [_header_question(first), _unlink_question(first)]
        answer, removed = self._client.ask(questions, deadline)
        header = _header(answer)
        stripe_count = header.stripe_count if header is not None else 1
        for start in range(1, stripe_count, _STEP_KEYS):
            indexes = range(start, min(start + _STEP_KEYS, stripe_count))
            others = [_unlink_question(stripe_key(chunk_key, index)) for index in indexes]
            self._client.ask(others, deadline)
        if isinstance(removed, ErrorReply):
            removed = error_of(removed)
        if isinstance(removed, RedisError):
            logger.warning("a chunk could not be removed: %s", removed)
        return removed == 1

    def keys(self, deadline: float) -> Iterator[ObjectKey]:
        """The keys of all chunks, some of them twice: SCANs of the whole database.

        Where a server does not answer until then they end early, with a line in the log.
        """
        pattern = escape_pattern(self._names.common) + b"*" + _FIRST_INDEX
        try:
            for name in self._client.scan(pattern, _STEP_KEYS, deadline):
                # Whatever the server matched: names are read here.
                key = self._names.parse(name.removesuffix(_FIRST_INDEX))
                if key is not None and name.endswith(_FIRST_INDEX):
                    yield key
        except RedisError as error:
            logger.warning("the list of chunks is not complete: %s", error)

    def _found(self, key: ObjectKey, answer: Answer) -> ChunkFrame | None:
        header = _header(answer)
        if header is None or header.stripe_index != 0:
            return None
        if header.fingerprint != self._names.fingerprint or header.chunk_hash != key.chunk_hash:
            return None
        # Stripe 0 is as large as any.
        return self._names.frame(key, header.metadata, header.payload_bytes)


def _header_question(name: bytes) -> Question:
    return Question(name, header_command(name))


def _unlink_question(name: bytes) -> Question:
    # One key each: in a cluster they have different slots.
    return Question(name, unlink_command(name))


def _header(answer: Answer) -> StripeHeader | None:
    """What a GETRANGE found, if it is a header."""
    if not isinstance(answer, bytes):
        return None
    try:
        return describe_header(answer)
    except FormatError:
        return None
