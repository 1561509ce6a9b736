# SPDX-License-Identifier: Apache-2.0
"""What a stripe is packed as, and what is found for it. Pure.

A codec makes the value of a stripe, and judges what a server has under its key. `Plain` stores
payloads, `Sealed` encrypts them. Both can pack numbers first (`chunks.packing`), where that saves
enough, and read packed payloads always.

A value counts only if its header is exactly the expected one and its payload has the checksum that
the header names. A wrong value that is ours beyond doubt, because it has a damaged header with our
magic and version, is CORRUPT. Any other is FOREIGN: another type, another magic or version, another
layout or chunk, cut into stripes otherwise, no header at all. A reader with keys expects sealed
values, one without keys plain ones.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks import packing
from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    MAGIC,
    SHORT_BYTES,
    STORE_ID,
    TENANT_BYTES,
    ChunkFrame,
    HeaderCheck,
    Verdict,
    add_checksums,
    mark_packed,
    parsed_metadata,
    stored_form,
)
from lmcache_redis.chunks.metadata import ENCODED_FORMATS
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp.bulk import MOST_TASKS, End, StripeFailure, unpacked
from lmcache_redis.seal import Opened, SealKeys
from lmcache_redis.tiers import ChunkIO, ReadOutcome

if TYPE_CHECKING:
    from typing_extensions import Buffer

# What was found for a stripe: the id of its store if it is good, else what the load ends with.
Found = ReadOutcome | bytes
# Packed or sealed stripes in a call: while the next are made, the kernel moves these.
_MADE_TOGETHER = 4
_NO_ROOM = memoryview(b"")
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
    tenant: bytes = b""

    @classmethod
    def of(cls, chunk: ChunkIO, index: int) -> StripeIO:
        key = stripe_key(chunk.key, index)
        return cls(key, chunk.frame, index, chunk.slots[index], chunk.tenant)

    def header(self, store_id: bytes, created_unix_ms: int, is_sealed: bool) -> bytearray:
        """That of a plain payload, without checksums and seal."""
        tenant = self.tenant or bytes(TENANT_BYTES)
        bare = self.frame.bare_header
        return bytearray(bare(self.stripe_index, store_id, created_unix_ms, is_sealed, tenant))


class Rooms:
    """Memory for the values of a call, used in turns. It is taken as it is written to."""

    def __init__(self, count: int) -> None:
        self._rooms = deque([memoryview(b"")] * count)

    def next(self, nbytes: int) -> memoryview:
        self._rooms.rotate()
        if len(self._rooms[0]) < nbytes:
            self._rooms[0] = np.empty(nbytes, np.uint8).data
        return self._rooms[0][:nbytes]


class Codec(ABC):
    """How payloads are stored. Of one thread: it may keep memory for the stripes of a call.

    packs: whether it packs payloads that it stores. together: the most stripes of a call.
    is_sealed: what a mover has received is not the payload yet: `unpack` brings it to its place.
    """

    together: int
    is_sealed: ClassVar[bool]

    def __init__(self, packs: bool) -> None:
        self._packs = packs
        self._packed = Rooms(_MADE_TOGETHER)
        self._received = Rooms(1)

    def _pack(self, stripe: StripeIO, header: bytearray) -> memoryview:
        """What is to be stored of a payload, and that in the header."""
        if self._packs and (sizes := elements_of(stripe.frame.metadata)):
            room = self._packed.next(stripe.payload.nbytes)
            element_bytes, used = pack(stripe.payload, sizes, room)
            if used:
                # Of what is encrypted it would tell something; and the tag is a better one.
                checksum = 0 if self.is_sealed else xxh3_64_intdigest(stripe.payload)
                mark_packed(header, element_bytes, used, checksum)
                return room[:used]
        return stripe.payload

    @abstractmethod
    def room_for(self, stripe: StripeIO) -> memoryview:
        """Where a mover receives a packed payload, until the next is received."""

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
        """The header of a good plain value, with what readers do not know zero."""
        return stripe.frame.bare_header(stripe.stripe_index, is_sealed=self.is_sealed)

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
        header, stored = value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        check = self._check(stripe, header)
        if not check.ok or check.stored_bytes != stored.nbytes:
            return self.judge(stripe, (End.OTHER_LENGTH, 0, header)) or ReadOutcome.FOREIGN
        return self._place(stripe, header, check, stored)

    @abstractmethod
    def _place(
        self, stripe: StripeIO, header: bytes, check: HeaderCheck, stored: memoryview
    ) -> Found:
        """Bring the payload of a value with the expected header to its place."""

    def _check(self, stripe: StripeIO, header: bytes) -> HeaderCheck:
        return stripe.frame.check_header(header, stripe.stripe_index, self.is_sealed)

    @abstractmethod
    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        """A mover says that a payload behind the expected header is not good."""


class Plain(Codec):
    """Payloads as they are, or packed. A mover unpacks them."""

    is_sealed = False

    def __init__(self, packs: bool = False) -> None:
        super().__init__(packs)
        self.together = _MADE_TOGETHER if packs else MOST_TASKS

    def room_for(self, stripe: StripeIO) -> memoryview:
        return self._received.next(stripe.payload.nbytes)

    def pack(
        self, stripe: StripeIO, store_id: bytes, created_unix_ms: int
    ) -> tuple[bytearray, memoryview]:
        header = stripe.header(store_id, created_unix_ms, False)
        return _hashed(header, self._pack(stripe, header))

    def unpack(self, stripe: StripeIO, header: bytes) -> Found:
        return header[STORE_ID]

    def _place(
        self, stripe: StripeIO, header: bytes, check: HeaderCheck, stored: memoryview
    ) -> Found:
        if xxh3_64_intdigest(stored) != check.checksum:
            return ReadOutcome.CORRUPT
        if not check.element_bytes:
            stripe.payload[:] = stored
        elif not unpacked(header, stored, stripe.payload):
            return ReadOutcome.CORRUPT
        return check.store_id

    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        # The native extension cannot hash short payloads. None of those is packed.
        is_good = not check.element_bytes and xxh3_64_intdigest(stripe.payload) == check.checksum
        return check.store_id if is_good else ReadOutcome.CORRUPT


class Sealed(Codec):
    """Payloads that are encrypted: into memory of this codec, right before they are sent.

    A payload is opened in its slot, and then unpacked, by the thread that received it. Meanwhile
    the kernel moves others.
    """

    together = _MADE_TOGETHER
    is_sealed = True

    def __init__(self, keys: SealKeys, packs: bool = False) -> None:
        super().__init__(packs)
        self._keys = keys
        self._sealed = Rooms(_MADE_TOGETHER)

    def room_for(self, stripe: StripeIO) -> memoryview:
        return _NO_ROOM

    def pack(
        self, stripe: StripeIO, store_id: bytes, created_unix_ms: int
    ) -> tuple[bytearray, memoryview]:
        header = stripe.header(store_id, created_unix_ms, True)
        stored = self._pack(stripe, header)
        room = self._sealed.next(stripe.payload.nbytes)
        return _hashed(header, self._keys.seal(stripe.key, header, stored, room))

    def unpack(self, stripe: StripeIO, header: bytes) -> Found:
        stored_bytes, element_bytes = stored_form(header)
        stored = stripe.payload[:stored_bytes]
        outcome = _OPENED[self._keys.open(stripe.key, header, stored)]
        if outcome is None and element_bytes:
            room = self._received.next(stored_bytes)
            room[:] = stored
            if not unpacked(header, room, stripe.payload):
                outcome = ReadOutcome.CORRUPT
        return outcome or header[STORE_ID]

    def _place(
        self, stripe: StripeIO, header: bytes, check: HeaderCheck, stored: memoryview
    ) -> Found:
        stripe.payload[: stored.nbytes] = stored
        return self.unpack(stripe, header)

    def _judge_payload(self, stripe: StripeIO, check: HeaderCheck) -> Found:
        # Its tag was not even looked at: the checksum of the ciphertext says that it is damaged.
        return ReadOutcome.CORRUPT


def codec_of(keys: SealKeys | None, packs: bool = False) -> Codec:
    """That of a plane whose values are sealed with these keys, or with none."""
    return Plain(packs) if keys is None else Sealed(keys, packs)


@functools.lru_cache(maxsize=1024)
def elements_of(metadata: bytes) -> tuple[int, ...]:
    """The bytes that the numbers of a chunk may have; none: they differ, or have no exponents.

    Pages that are stored as bytes are vLLM's of fp8, or mostly have numbers of two bytes.
    """
    described = parsed_metadata(metadata)
    names = {*described.dtype_names}
    sizes = {packing.ELEMENT_BYTES.get(name, 0) for name in names - {"uint8"}}
    if not names or 0 in sizes or len(sizes) > 1 or described.fmt in ENCODED_FORMATS:
        return ()
    return (*sizes,) or (1, 2)


def pack(payload: Buffer, sizes: tuple[int, ...], into: memoryview) -> tuple[int, int]:
    """The first of these sizes of numbers with which packing pays, and the bytes used; 0: none.

    Numbers of more bytes have noise in most of them: as single bytes they are refused.
    """
    for element_bytes in sizes:
        if used := packing.pack(payload, element_bytes, into):
            return element_bytes, used
    return 0, 0


def _hashed(header: bytearray, stored: memoryview) -> tuple[bytearray, memoryview]:
    """With checksums if the native extension cannot compute them."""
    if stored.nbytes <= SHORT_BYTES:
        add_checksums(header, xxh3_64_intdigest(stored))
    return header, stored
