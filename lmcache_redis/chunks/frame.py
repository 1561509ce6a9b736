# SPDX-License-Identifier: Apache-2.0
"""The frame of one Redis value: a header of 640 bytes, then one stripe's payload.

The header names the layout, chunk, stripe and store of the payload, and has the checksums of the
payload and of itself. Little-endian:

      0  4s  magic b"LMCR"            56  u64 payload checksum  177  u8  element bytes
      4  u16 version, 2               64  32s layout            178  6   zeros
      6  u16 header bytes, 640            fingerprint           184  u64 stored bytes
      8  16s store id                 96  u8  hash length       192  u64 plain checksum
     24  u16 stripe index             97  63s chunk hash,       200  8s  tenant
     26  u16 stripe count                 zero padded           208  336s RemoteMetadata of
     28  u32 flags                   160  u64 created, Unix ms            the chunk, zero padded
     32  u64 payload bytes           168  u64 header checksum   544  u16 share, or 0
     40  u64 payload offset          176  u8  codec             546  46  zeros
     48  u64 chunk bytes                                        592  48s seal

Checksums are xxh3-64. That of the payload is of its stored bytes; the header's is computed with its
own field zero. With the codec PACKED the payload is stored in fewer bytes (`packing`), with the
flag SEALED those are encrypted (`lmcache_redis.seal`). docs/reference/value-format.md is the
specification. A reader knows everything in advance but store id, checksums, time, tenant, seal and
how it is stored, so `ChunkFrame.check_header` compares bytes; `describe_header` needs no frame.
"""

from __future__ import annotations

import enum
import functools
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.metadata import MAX_METADATA_BYTES, MAX_SIZE, RemoteMetadata
from lmcache_redis.errors import FormatError

MAGIC = b"LMCR"
HEADER_BYTES = 640
VERSION = 2
STORE_ID_BYTES = 16
FINGERPRINT_BYTES = 32
MAX_STRIPES = 0xFFFF
# Up to this size xxh3 has another algorithm, which the native extension lacks. None is packed.
SHORT_BYTES = 240
STORE_ID = slice(8, 24)
FLAGS_AT = 28
PAYLOAD_CHECKSUM = slice(56, 64)
SEALED = 1  # the flag
CODEC_AT = 176
PACKED = 1  # the codec; 0: plain
TENANT_BYTES = 8
SEAL_KEY_ID_BYTES = 8
SEAL_BYTES = 48
SEAL_AT = HEADER_BYTES - SEAL_BYTES

_PREAMBLE = struct.Struct("<4sHH")
_PLACE = struct.Struct("<HHIQQQ")
# preamble | store id | place | payload checksum | layout and chunk | created | own | stored form
# | plain checksum | tenant | metadata | zeros, seal
_PARTS = struct.Struct("<8s16s32sQ96sQQ16sQ8s336s96s")
_STORED_FORM = struct.Struct("<BB6sQ")
_STORED_AT = slice(176, 192)
_PLAIN_CHECKSUM = slice(192, 200)
_TENANT = slice(200, 208)
_PAYLOAD_BYTES = slice(8, 16)  # of a place
_ELEMENTS = (1, 2, 4)
_CREATED = slice(160, 168)
_OWN_CHECKSUM = slice(168, 176)
_NO_CHECKSUM = bytes(8)
_NO_TENANT = bytes(TENANT_BYTES)
_NO_CODEC = bytes(8)
_NO_STORE_ID = bytes(STORE_ID_BYTES)
_NO_SEAL = bytes(SEAL_BYTES)
_AFTER_METADATA = struct.Struct("<H94s")
# Parsed once: chunks of one layout share their metadata.
parsed_metadata = functools.lru_cache(maxsize=1024)(RemoteMetadata.deserialize)
_EXPECTED_PREAMBLE = _PREAMBLE.pack(MAGIC, VERSION, HEADER_BYTES)


class Verdict(enum.Enum):
    """The verdict of a reader on a header; all but OK are misses."""

    OK = "ok"
    BAD_MAGIC = "not a stripe"
    BAD_VERSION = "of an unknown version"
    CORRUPT_HEADER = "a damaged header"
    FOREIGN = "of another layout, chunk or stripe"
    SEALED = "the expected one, but sealed"
    NOT_SEALED = "the expected one, but not sealed"


class HeaderCheck(NamedTuple):
    """The verdict on a header; the rest is set if it is OK.

    checksum: of the stored bytes. stored_bytes: their number. element_bytes: of a packed payload;
    0: it is plain.
    """

    verdict: Verdict
    store_id: bytes = b""
    checksum: int = 0
    stored_bytes: int = 0
    element_bytes: int = 0

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """The fields that all stripe headers of one chunk share.

    fingerprint: 32 bytes of the layout. chunk_hash: 1 to 63 bytes. stripe_payload_bytes: of every
    stripe but the last. metadata: the serialized RemoteMetadata. share: its number + 1 if this is a
    share of a chunk, which the fingerprint does not tell; else 0. Raises FormatError for values
    that do not fit a header, such as a chunk of more than 65,535 stripes.
    """

    fingerprint: bytes
    chunk_hash: bytes
    chunk_bytes: int
    stripe_payload_bytes: int
    metadata: bytes
    share: int = field(default=0, compare=False)
    stripe_count: int = field(init=False, repr=False, compare=False)
    _layout_and_chunk: bytes = field(init=False, repr=False, compare=False)
    _padded_metadata: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise FormatError(
                f"a layout fingerprint has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}"
            )
        hash_len = len(self.chunk_hash)
        if not 1 <= hash_len <= MAX_HASH_BYTES:
            raise FormatError(f"a chunk hash has 1 to {MAX_HASH_BYTES} bytes, not {hash_len}")
        stripe_count = _stripe_count(self.chunk_bytes, self.stripe_payload_bytes)
        described_bytes = parsed_metadata(self.metadata).length
        if described_bytes != self.chunk_bytes:
            raise FormatError(
                f"metadata of {described_bytes} bytes for a chunk of {self.chunk_bytes}"
            )
        padded_hash = self.chunk_hash.ljust(MAX_HASH_BYTES, b"\0")
        layout_and_chunk = b"".join((self.fingerprint, bytes((hash_len,)), padded_hash))
        object.__setattr__(self, "stripe_count", stripe_count)
        object.__setattr__(self, "_layout_and_chunk", layout_and_chunk)
        object.__setattr__(self, "_padded_metadata", self.metadata.ljust(MAX_METADATA_BYTES, b"\0"))

    def header(self, index: int, store_id: bytes, checksum: int, created_unix_ms: int) -> bytearray:
        """The header of stripe `index`, plain and not sealed. checksum: of the payload.

        store_id: 16 bytes, of all stripes of one store. Raises FormatError for what does not fit.
        """
        header = bytearray(self.bare_header(index, store_id, created_unix_ms))
        add_checksums(header, checksum)
        return header

    def bare_header(
        self,
        index: int,
        store_id: bytes = _NO_STORE_ID,
        created_unix_ms: int = 0,
        is_sealed: bool = False,
        tenant: bytes = _NO_TENANT,
    ) -> bytes:
        """The header of stripe `index`, plain, without checksums and seal.

        tenant: 8 bytes of a digest.
        """
        if len(store_id) != STORE_ID_BYTES:
            raise FormatError(f"a store id has {STORE_ID_BYTES} bytes, not {len(store_id)}")
        try:
            created = created_unix_ms.to_bytes(8, "little")
        except OverflowError as error:
            raise FormatError(f"a header that cannot be written: {error}") from None
        place = self._place(index, SEALED if is_sealed else 0)
        return b"".join(
            (
                _EXPECTED_PREAMBLE,
                store_id,
                place,
                _NO_CHECKSUM,
                self._layout_and_chunk,
                created,
                _NO_CHECKSUM,
                _NO_CODEC,
                place[_PAYLOAD_BYTES],
                _NO_CHECKSUM,
                tenant,
                self._padded_metadata,
                _AFTER_METADATA.pack(self.share, b""),
            )
        )

    def check_header(
        self, buf: bytes | bytearray | memoryview, index: int, is_sealed: bool = False
    ) -> HeaderCheck:
        """Whether the first 640 bytes of `buf` are the header of stripe `index`. Never raises.

        is_sealed: whether it must be sealed; the seal itself is not checked.
        """
        raw = _header_of(buf)
        if (
            len(raw) == HEADER_BYTES
            and 0 <= index < self.stripe_count
            and is_expected(raw, self.bare_header(index, is_sealed=is_sealed))
        ):
            checksum = int.from_bytes(raw[PAYLOAD_CHECKSUM], "little")
            return HeaderCheck(Verdict.OK, raw[STORE_ID], checksum, *stored_form(raw))
        return HeaderCheck(self._fault(raw, index))

    def _place(self, index: int, flags: int) -> bytes:
        """The 32 bytes at 24: which stripe, of how many, flags, and its place in the chunk."""
        # Cached outside the frame: chunks of one layout have the same places.
        return _place(index, self.stripe_count, flags, self.stripe_payload_bytes, self.chunk_bytes)

    def _fault(self, raw: bytes, index: int) -> Verdict:
        """Why a header is not the expected one: the first reason in the order of trust."""
        fault = _own_fault(raw)
        if fault is not None:
            return fault
        is_sealed = bool(raw[FLAGS_AT] & SEALED)
        if 0 <= index < self.stripe_count and is_expected(
            raw, self.bare_header(index, is_sealed=is_sealed)
        ):
            return Verdict.SEALED if is_sealed else Verdict.NOT_SEALED
        return Verdict.FOREIGN


@dataclass(frozen=True, slots=True)
class StripeHeader:
    """The fields of a header. checksum, stored_bytes: of what follows the header.

    element_bytes: of a packed payload; 0: it is plain. share: as in `ChunkFrame`. tenant: a digest,
    or None. sealed_with: the id of the key, or None.
    """

    store_id: bytes
    stripe_index: int
    stripe_count: int
    payload_bytes: int
    payload_offset: int
    chunk_bytes: int
    stored_bytes: int
    element_bytes: int
    checksum: int
    fingerprint: bytes
    chunk_hash: bytes
    created_unix_ms: int
    metadata: RemoteMetadata
    share: int = 0
    tenant: bytes | None = None
    sealed_with: bytes | None = None


def describe_header(buf: bytes | bytearray | memoryview) -> StripeHeader:
    """The header in the first 640 bytes of a value. Raises FormatError unless it is consistent."""
    raw = _header_of(buf)
    fault = _own_fault(raw)
    if fault is not None:
        raise FormatError(f"the header of a stripe was expected, found {fault.value}")
    parts = _PARTS.unpack(raw)
    _, store_id, place, checksum, layout_and_chunk, created, *_, tenant, described, behind = parts
    index, count, flags, payload, offset, chunk_bytes = _PLACE.unpack(place)
    is_sealed = bool(flags & SEALED)
    hash_end = FINGERPRINT_BYTES + 1 + layout_and_chunk[FINGERPRINT_BYTES]
    metadata = RemoteMetadata.deserialize(described)
    # Every stripe but the last has the same size; the offset of the last gives that size.
    frame = ChunkFrame(
        layout_and_chunk[:FINGERPRINT_BYTES],
        layout_and_chunk[FINGERPRINT_BYTES + 1 : hash_end],
        chunk_bytes,
        offset // index if index and index == count - 1 else payload,
        metadata.serialize(),
        _AFTER_METADATA.unpack(behind)[0],
    )
    check = frame.check_header(raw, index, is_sealed)
    if not check.ok:
        raise FormatError(
            f"stripe {index} of {count}, {payload} bytes at {offset}, cannot be part of a "
            f"chunk of {chunk_bytes} bytes"
        )
    return StripeHeader(
        store_id=store_id,
        stripe_index=index,
        stripe_count=count,
        payload_bytes=payload,
        payload_offset=offset,
        chunk_bytes=chunk_bytes,
        stored_bytes=check.stored_bytes,
        element_bytes=check.element_bytes,
        checksum=checksum,
        fingerprint=frame.fingerprint,
        chunk_hash=frame.chunk_hash,
        created_unix_ms=created,
        metadata=metadata,
        share=frame.share,
        tenant=None if tenant == _NO_TENANT else tenant,
        sealed_with=raw[SEAL_AT : SEAL_AT + SEAL_KEY_ID_BYTES] if is_sealed else None,
    )


def add_checksums(header: bytearray, checksum: int) -> None:
    """Write the checksum of the stored bytes, and then the header's own, into a header."""
    header[PAYLOAD_CHECKSUM] = checksum.to_bytes(8, "little")
    header[_OWN_CHECKSUM] = _own_checksum(header).to_bytes(8, "little")


def mark_packed(
    header: bytearray, element_bytes: int, stored_bytes: int, plain_checksum: int = 0
) -> None:
    """Make it the header of a packed payload. plain_checksum: of what was packed; 0: not given."""
    header[_STORED_AT] = _STORED_FORM.pack(PACKED, element_bytes, b"", stored_bytes)
    header[_PLAIN_CHECKSUM] = plain_checksum.to_bytes(8, "little")


def stored_form(header: bytes | bytearray) -> tuple[int, int]:
    """The number of stored bytes, and the bytes of an element if they are packed, else 0."""
    _, element_bytes, _, stored_bytes = _STORED_FORM.unpack(header[_STORED_AT])
    return stored_bytes, element_bytes


def plain_checksum(header: bytes | bytearray) -> int:
    """Of the payload before it was packed; 0: not given."""
    return int.from_bytes(header[_PLAIN_CHECKSUM], "little")


def is_expected(header: bytes, bare: bytes | bytearray, stored_bytes: int | None = None) -> bool:
    """Whether a header is undamaged, and equals `bare` in the fields that readers can know.

    stored_bytes: how many follow it, if that is known.
    """
    if stored_bytes is not None and stored_bytes != stored_form(header)[0]:
        return False
    if _own_checksum(header) != int.from_bytes(header[_OWN_CHECKSUM], "little"):
        return False
    masked = bytearray(header)
    masked[STORE_ID] = _NO_STORE_ID
    masked[PAYLOAD_CHECKSUM] = masked[_CREATED] = masked[_OWN_CHECKSUM] = _NO_CHECKSUM
    masked[_PLAIN_CHECKSUM] = masked[_TENANT] = _NO_TENANT
    if bare[FLAGS_AT] & SEALED:
        masked[SEAL_AT:] = _NO_SEAL
    if masked[CODEC_AT] == PACKED:
        _, element_bytes, zeros, stored_bytes = _STORED_FORM.unpack(masked[_STORED_AT])
        payload_bytes = stored_form(bare)[0]
        is_possible = element_bytes in _ELEMENTS and not any(zeros)
        if not is_possible or not SHORT_BYTES < stored_bytes < payload_bytes:
            return False
        masked[_STORED_AT] = bare[_STORED_AT]
    return masked == bare


def _header_of(buf: bytes | bytearray | memoryview) -> bytes:
    """The first 640 bytes, or fewer. A copy, which cannot change during the check."""
    return bytes(memoryview(buf)[:HEADER_BYTES])[:HEADER_BYTES]


def _own_checksum(raw: bytes | bytearray) -> int:
    before, after = raw[: _OWN_CHECKSUM.start], raw[_OWN_CHECKSUM.stop :]
    return xxh3_64_intdigest(before + _NO_CHECKSUM + after)


def _own_fault(raw: bytes) -> Verdict | None:
    """What is wrong with a header by itself, whichever chunk it belongs to; None if nothing is."""
    if len(raw) < HEADER_BYTES:
        return Verdict.CORRUPT_HEADER
    preamble, _, place, _, _, _, own, *_ = _PARTS.unpack(raw)
    magic, version, header_bytes = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        return Verdict.BAD_MAGIC
    if version != VERSION:
        return Verdict.BAD_VERSION
    if own != _own_checksum(raw) or header_bytes != HEADER_BYTES:
        return Verdict.CORRUPT_HEADER
    # An unknown flag or codec may change the meaning of the payload.
    is_unknown = _PLACE.unpack(place)[2] & ~SEALED or raw[CODEC_AT] > PACKED
    return Verdict.BAD_VERSION if is_unknown else None


@functools.lru_cache(maxsize=4096)
def _place(
    index: int, count: int, flags: int, stripe_payload_bytes: int, chunk_bytes: int
) -> bytes:
    if not 0 <= index < count:
        raise FormatError(f"a chunk of {count} stripes has no stripe {index}")
    offset = index * stripe_payload_bytes
    payload_bytes = min(stripe_payload_bytes, chunk_bytes - offset)
    return _PLACE.pack(index, count, flags, payload_bytes, offset, chunk_bytes)


def pieces(chunk_bytes: int, stripe_bytes: int) -> int:
    """How many stripes there are. Raises FormatError unless both sizes are possible."""
    for what, size in (("a chunk", chunk_bytes), ("a stripe", stripe_bytes)):
        if not 0 < size <= MAX_SIZE:
            raise FormatError(f"{what} has 1 to {MAX_SIZE} bytes, not {size}")
    return -(-chunk_bytes // stripe_bytes)


def _stripe_count(chunk_bytes: int, stripe_bytes: int) -> int:
    count = pieces(chunk_bytes, stripe_bytes)
    if count > MAX_STRIPES:
        raise FormatError(
            f"a chunk of {chunk_bytes} bytes in stripes of {stripe_bytes} has {count}, "
            f"at most {MAX_STRIPES} can be numbered: make stripe_bytes larger"
        )
    return count
