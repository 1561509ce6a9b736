"""What stands in Redis about the chunks of the remote tier: their keys, headers and removal.

Chunks are stripes as in docs/value-format.md, in a namespace of this tier. The metadata in a
header says what a chunk is, so there is one fingerprint for all; with the fingerprint of an
engine's layout the chunks are those that agents keep of it. Small questions only: payloads are
the data plane's.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence

from lmcache_redis.errors import FormatError, RedisError
from lmcache_redis.keys import (
    KEY_MAGIC,
    NAMESPACE_BYTES,
    ObjectKey,
    key_stem,
    parse_stripe_key,
    stripe_key,
)
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.resp.wire import escape_pattern, pack_command
from lmcache_redis.storage.asking import Answer, Asking, Question
from lmcache_redis.stripe import (
    HEADER_BYTES,
    ChunkFrame,
    StripeHeader,
    describe_header,
    stripe_payload_bytes,
)

logger = logging.getLogger(__name__)

# What all chunks of this tier have in the place of a layout's fingerprint.
FINGERPRINT = hashlib.blake2b(b"lmcr1.tensors", digest_size=32).digest()
NAMESPACE = FINGERPRINT[:NAMESPACE_BYTES]
# One SCAN, one batch of removals: well under a millisecond of the server's.
_STEP_KEYS = 512
_FIRST_INDEX = b"\0\0"


class Catalog:
    """Thread-safe. prefix: before every key. slot_bytes: most payload of a stripe we write.

    layout: see the module; None: chunks of this tier's own. No call raises for what the servers
    answer, or do not.
    """

    def __init__(
        self, asking: Asking, prefix: bytes, slot_bytes: int, layout: bytes | None = None
    ) -> None:
        self._asking = asking
        self._prefix = prefix
        self._slot_bytes = slot_bytes
        self._fingerprint = FINGERPRINT if layout is None else layout
        self._namespace = NAMESPACE if layout is None else _namespace_of(layout)
        self._stem = functools.lru_cache(maxsize=256)(self._stem_of)

    # ------------------------------------------------------------------ names

    def chunk_key(self, key: ObjectKey) -> bytes:
        """The key of a chunk's stripes, without the index."""
        stem: bytes = self._stem(key.model_name, key.kv_rank, len(key.chunk_hash))
        return stem + key.chunk_hash

    def first_key(self, key: ObjectKey) -> bytes:
        """The key of its stripe 0."""
        return stripe_key(self.chunk_key(key), 0)

    def frame(self, key: ObjectKey, metadata: RemoteMetadata) -> ChunkFrame:
        """A chunk as it is written here. Raises FormatError for one that cannot be."""
        stripe_bytes = stripe_payload_bytes(metadata.length, self._slot_bytes)
        return _frame(self._fingerprint, key, metadata, stripe_bytes)

    def _stem_of(self, model_name: str, kv_rank: int, hash_len: int) -> bytes:
        return key_stem(self._namespace, model_name, kv_rank, hash_len, self._prefix)

    # -------------------------------------------------------------- questions

    def find(self, keys: Sequence[ObjectKey], deadline: float) -> list[ChunkFrame | None]:
        """Each chunk as it was cut by whoever wrote it, and None where there is none of ours."""
        questions = [_header_question(self.first_key(key)) for key in keys]
        answers = self._asking.ask(questions, deadline)
        return [self._found(key, answer) for key, answer in zip(keys, answers, strict=True)]

    def remove(self, key: ObjectKey, deadline: float) -> bool:
        """Remove a chunk, or whatever is in its place; whether there was something.

        Stripe 0 first: from then on nobody finds it. False also where nobody answered.
        """
        chunk_key, first = self.chunk_key(key), self.first_key(key)
        questions = [_header_question(first), _unlink_question(first)]
        answer, removed = self._asking.ask(questions, deadline)
        header = _header(answer)
        stripe_count = header.stripe_count if header is not None else 1
        for start in range(1, stripe_count, _STEP_KEYS):
            indexes = range(start, min(start + _STEP_KEYS, stripe_count))
            others = [_unlink_question(stripe_key(chunk_key, index)) for index in indexes]
            self._asking.ask(others, deadline)
        if isinstance(removed, RedisError):
            logger.warning("a chunk could not be removed: %s", removed)
        return removed == 1

    def keys(self, deadline: float) -> Iterator[ObjectKey]:
        """The keys of all chunks, some of them twice: SCANs of the whole database.

        Where a server does not answer until then they end early, with a line in the log.
        """
        own = self._prefix + KEY_MAGIC + self._namespace
        pattern = escape_pattern(own) + b"*" + _FIRST_INDEX
        try:
            for name in self._asking.keys(pattern, _STEP_KEYS, deadline):
                # Whatever the server matched: names are read here.
                key = self._parsed(name)
                if key is not None:
                    yield key
        except RedisError as error:
            logger.warning("the list of chunks is not complete: %s", error)

    def _parsed(self, name: bytes) -> ObjectKey | None:
        try:
            namespace, key, index = parse_stripe_key(name, self._prefix)
        except FormatError:
            return None
        return key if namespace == self._namespace and index == 0 else None

    def _found(self, key: ObjectKey, answer: Answer) -> ChunkFrame | None:
        header = _header(answer)
        if header is None or header.stripe_index != 0:
            return None
        if header.fingerprint != self._fingerprint or header.chunk_hash != key.chunk_hash:
            return None
        # Stripe 0 is as large as any.
        return _frame(self._fingerprint, key, header.metadata, header.payload_bytes)


def _namespace_of(layout: bytes) -> bytes:
    """As agents have it: `ChunkForm.namespace`."""
    return layout.hex()[:NAMESPACE_BYTES].encode()


def _header_question(name: bytes) -> Question:
    return Question(name, pack_command(b"GETRANGE", name, b"0", b"%d" % (HEADER_BYTES - 1)))


def _unlink_question(name: bytes) -> Question:
    # One key each: in a cluster they have different slots.
    return Question(name, pack_command(b"UNLINK", name))


def _header(answer: Answer) -> StripeHeader | None:
    """What a GETRANGE found, if it is a header."""
    if not isinstance(answer, bytes):
        return None
    try:
        return describe_header(answer)
    except FormatError:
        return None


def _frame(
    fingerprint: bytes, key: ObjectKey, metadata: RemoteMetadata, stripe_bytes: int
) -> ChunkFrame:
    encoded = metadata.serialize()
    return ChunkFrame(fingerprint, key.chunk_hash, metadata.length, stripe_bytes, encoded)
