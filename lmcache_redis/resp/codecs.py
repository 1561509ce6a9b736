# SPDX-License-Identifier: Apache-2.0
"""What a stripe is packed as, and what is found for it. Pure.

A codec makes the value of a stripe, and judges what a server has under its key. `Plain` stores
payloads as they are, `Sealed` encrypts them.

A value counts only if its header is exactly the expected one and its payload has the checksum that
the header names. A wrong value that is ours beyond doubt, because it has a damaged header with our
magic and version, is CORRUPT. Any other is FOREIGN: another type, another magic or version, another
layout or chunk, cut into stripes otherwise, no header at all. A reader with keys expects sealed
values, one without keys plain ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    MAGIC,
    STORE_ID,
    ChunkFrame,
    HeaderCheck,
    Verdict,
    add_checksums,
)
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp.bulk import MOST_TASKS, SHORT_BYTES, End, StripeFailure
from lmcache_redis.seal import Opened, SealKeys
from lmcache_redis.tiers import ChunkIO, ReadOutcome

# What was found for a stripe: the id of its store if it is good, else what the load ends with.
Found = ReadOutcome | bytes
# Sealed stripes in a call: while the next are sealed or opened, the kernel moves these.
_SEALED_TOGETHER = 4
_OPENED = {
    Opened.OK: None,
    Opened.UNKNOWN_KEY: ReadOutcome.NOT_OPENED,
    Opened.FORGED: ReadOutcome.CORRUPT,
}


class StripeIO(NamedTuple):
    """A stripe, and where its payload is in memory."""

    key: bytes
    frame: ChunkFrame
    stripe_index: int
    payload: memoryview

    @classmethod
    def of(cls, chunk: ChunkIO, index: int) -> StripeIO:
        return cls(stripe_key(chunk.key, index), chunk.frame, index, chunk.slots[index])


class Codec(ABC):
    """How payloads are stored. Of one thread: it may keep memory for the stripes of a call.

    together: the most stripes of a call. is_packed: what a mover has received is not the payload
    yet, and `unpack` brings it to its place.
    """

    together: ClassVar[int] = MOST_TASKS
    is_packed: ClassVar[bool]

    def fits(self, frame: ChunkFrame) -> bool:
        """Whether headers have room for what this codec adds to them."""
        return True

    @abstractmethod
    def stored_bytes(self, payload_bytes: int) -> int:
        """The bytes behind the header of a value."""

    @abstractmethod
    def pack(
        self, stripe: StripeIO, store_id: bytes, created_unix_ms: int
    ) -> tuple[bytearray, memoryview]:
        """The header of a value, with checksums where a mover cannot hash; what follows it.

        Both must stay until the stripe is sent, or `together` others are packed.
        """

    @abstractmethod
    def unpack(self, stripe: StripeIO, header: bytes) -> Found:
        """Bring the payload to its place, in memory that has what was stored."""

    def expected(self, stripe: StripeIO) -> bytes:
        """The header of a good value, with what readers do not know zero."""
        return stripe.frame.bare_header(stripe.stripe_index, is_sealed=self.is_packed)

    def judge(self, stripe: StripeIO, failure: StripeFailure) -> Found | None:
        """What a mover found, if that is about the value; None: about server or connection."""
        end, _, data = failure
        if end == End.NOTHING:
            return ReadOutcome.INCOMPLETE
        if end == End.LINE and data.startswith(b"-WRONGTYPE"):
            return ReadOutcome.FOREIGN
        if end not in (End.MISMATCH, End.OTHER_LENGTH):
            return None
        check = self._check(stripe, data)
        if check.ok and end == End.MISMATCH:
            return self._judge_payload(stripe, check)
        if check.verdict in (Verdict.NOT_SEALED, Verdict.SEALED):
            return ReadOutcome.NOT_OPENED
        # A header cut short before the version is CORRUPT_HEADER, too: the magic decides.
        if check.ok or (check.verdict is Verdict.CORRUPT_HEADER and data[: len(MAGIC)] == MAGIC):
            return ReadOutcome.CORRUPT
        return ReadOutcome.FOREIGN

    def place(self, stripe: StripeIO, value: object) -> Found:
        """Judge a whole value that was received apart, and bring its payload to its place."""
        if not isinstance(value, bytes):
            return ReadOutcome.INCOMPLETE
        header, end = value[:HEADER_BYTES], End.OTHER_LENGTH
        if len(value) == HEADER_BYTES + self.stored_bytes(stripe.payload.nbytes):
            end, stripe.payload[:] = End.MISMATCH, value[HEADER_BYTES:]
            if self.is_packed and self._check(stripe, header).ok:
                return self.unpack(stripe, header)
        return self.judge(stripe, (end, 0, header)) or ReadOutcome.FOREIGN

    def _check(self, stripe: StripeIO, header: bytes) -> HeaderCheck:
        return stripe.frame.check_header(header, stripe.stripe_index, self.is_packed)

    @abstractmethod
    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        """A mover says that a payload behind the expected header is not good."""


class Plain(Codec):
    """Payloads as they are."""

    is_packed = False

    def stored_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    def pack(
        self, stripe: StripeIO, store_id: bytes, created_unix_ms: int
    ) -> tuple[bytearray, memoryview]:
        header = bytearray(stripe.frame.bare_header(stripe.stripe_index, store_id, created_unix_ms))
        return _hashed(header, stripe.payload)

    def unpack(self, stripe: StripeIO, header: bytes) -> Found:
        return header[STORE_ID]

    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        # The native extension cannot hash short payloads.
        if xxh3_64_intdigest(stripe.payload) == check.checksum:
            return check.store_id
        return ReadOutcome.CORRUPT


class Sealed(Codec):
    """Payloads that are encrypted: into memory of this codec, right before they are sent.

    A payload is opened in its slot, by the thread that received it. Meanwhile the kernel moves
    others.
    """

    together = _SEALED_TOGETHER
    is_packed = True

    def __init__(self, keys: SealKeys) -> None:
        self._keys = keys
        self._rooms = deque([bytearray()] * _SEALED_TOGETHER)

    def fits(self, frame: ChunkFrame) -> bool:
        return frame.has_room_for_seal

    def stored_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    def pack(
        self, stripe: StripeIO, store_id: bytes, created_unix_ms: int
    ) -> tuple[bytearray, memoryview]:
        header = bytearray(
            stripe.frame.bare_header(stripe.stripe_index, store_id, created_unix_ms, True)
        )
        self._rooms.rotate()
        if len(self._rooms[0]) < stripe.payload.nbytes:
            self._rooms[0] = bytearray(stripe.payload.nbytes)
        room = memoryview(self._rooms[0])
        return _hashed(header, self._keys.seal(stripe.key, header, stripe.payload, room))

    def unpack(self, stripe: StripeIO, header: bytes) -> Found:
        outcome = _OPENED[self._keys.open(stripe.key, header, stripe.payload)]
        return outcome or header[STORE_ID]

    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        # Its tag was not even looked at: the checksum of the ciphertext says that it is damaged.
        return ReadOutcome.CORRUPT


def codec_of(keys: SealKeys | None) -> Codec:
    """That of a plane whose values are sealed with these keys, or with none."""
    return Plain() if keys is None else Sealed(keys)


def _hashed(header: bytearray, stored: memoryview) -> tuple[bytearray, memoryview]:
    """With checksums if the native extension cannot compute them."""
    if stored.nbytes <= SHORT_BYTES:
        add_checksums(header, xxh3_64_intdigest(stored))
    return header, stored
