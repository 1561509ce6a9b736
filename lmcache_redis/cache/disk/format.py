# SPDX-License-Identifier: Apache-2.0
"""One chunk in one file, byte by byte, and the name of that file.

A first page, then exactly the payload. Little-endian:

        0  640s  header of the chunk's stripe 0 (`lmcache_redis.chunks.frame`): the frame (layout
                 fingerprint, hash, metadata, length, stripe size); its checksum covers the whole
                 payload
      640  4s    magic b"LMCK"
      644  u16   version, 3
      646  u16   key bytes, n
      648  u64   xxh3-64 of bytes 640 to 4,095, with these eight zero
      656  n     chunk key: in Redis the key of its stripes, without the index
    656+n        zeros
    4,096        payload

A restart reads one page of each file. The page has the key because the file name has only the key's
digest. A file is named

    <aa>/<digest>-<sequence>.lmcr

digest: BLAKE2b-160 of the chunk key with the personalization b"lmcr2.disk", in 40 hex digits; aa:
its first two. sequence: 16 hex digits, increasing with each write, so that no name is used twice
and a late removal never removes a successor. While a file is being written its name ends in
`.lmcr.tmp`.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    MAGIC,
    STORE_ID_BYTES,
    ChunkFrame,
    describe_header,
)
from lmcache_redis.chunks.keys import hash_in, hash_tag
from lmcache_redis.errors import FormatError

PAGE_BYTES = 4096

FANOUT_NAME = re.compile(r"[0-9a-f]{2}")
FILE_NAME = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.lmcr(\.tmp)?")
TEMPORARY_SUFFIX = ".tmp"

_KEY_HEAD = struct.Struct("<4sHHQ")
_KEY_AT = HEADER_BYTES + _KEY_HEAD.size
_MAGIC = b"LMCK"
_VERSION = 3
_HEADER_BYTES = slice(6, 8)  # of a header, in all versions


class OtherVersionError(FormatError):
    """A file is of another version of this format."""


class StoredShape(NamedTuple):
    """What frames of chunks of one layout and size have in common; an index stores it once."""

    fingerprint: bytes
    metadata: bytes
    chunk_bytes: int
    hash_bytes: int
    stripe_payload_bytes: int
    share: int

    @classmethod
    def of(cls, frame: ChunkFrame) -> StoredShape:
        return cls(
            frame.fingerprint,
            frame.metadata,
            frame.chunk_bytes,
            len(frame.chunk_hash),
            frame.stripe_payload_bytes,
            frame.share,
        )

    def is_of(self, frame: ChunkFrame) -> bool:
        """Whether that is its frame, whatever the size of its stripes."""
        cut = self._replace(stripe_payload_bytes=frame.stripe_payload_bytes)
        return cut == StoredShape.of(frame)

    def frame(self, key: bytes) -> ChunkFrame:
        """The frame of the chunk with this key, which ends with the chunk's hash."""
        return ChunkFrame(
            self.fingerprint,
            hash_in(key, self.hash_bytes),
            self.chunk_bytes,
            self.stripe_payload_bytes,
            self.metadata,
            self.share,
        )


@dataclass(slots=True, eq=False)
class StoredFile:
    """A file of the tier."""

    key: bytes
    sequence: int
    cut: StoredShape

    @property
    def frame(self) -> ChunkFrame:
        return self.cut.frame(self.key)

    @property
    def nbytes(self) -> int:
        return disk_bytes(self.cut.chunk_bytes)


def file_path(key: bytes, sequence: int) -> str:
    """The path of a chunk, relative to the directory of the tier."""
    digest = key_digest(key)
    return f"{digest[:2]}/{digest}-{sequence:016x}.lmcr"


def key_digest(key: bytes) -> str:
    return blake2b(key, digest_size=20, person=b"lmcr2.disk").hexdigest()


def disk_bytes(payload_bytes: int) -> int:
    """The bytes that a file takes in a file system whose blocks are pages."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def pack_page(key: bytes, frame: ChunkFrame, checksum: int) -> bytearray:
    """The first page of a file. Raises OSError if the key does not fit."""
    created_unix_ms = max(0, time.time_ns() // 1_000_000)
    return frame.header(0, os.urandom(STORE_ID_BYTES), checksum, created_unix_ms) + _key_part(key)


def check_page(page: bytes | bytearray, key: bytes, frame: ChunkFrame) -> int:
    """The payload's checksum. Raises FormatError unless this is the page of this chunk."""
    found = frame.check_header(page, 0)
    if not found.ok:
        raise FormatError(f"its header is {found.verdict.value}")
    if found.element_bytes:
        raise FormatError("its header is that of a packed payload")
    if page[HEADER_BYTES:] != _key_part(key):
        raise FormatError("its key is damaged or different")
    return found.checksum


def parse_page(page: bytes) -> tuple[bytes, StoredShape]:
    """Key and cut of a file. Raises FormatError unless its first page is undamaged.

    Raises OtherVersionError if it says that it is of another version.
    """
    if len(page) != PAGE_BYTES:
        raise FormatError(f"it ends after {len(page)} bytes")
    header_bytes = int.from_bytes(page[_HEADER_BYTES], "little")  # others have headers of others
    if page[: len(MAGIC)] == MAGIC and header_bytes <= PAGE_BYTES - _KEY_HEAD.size:
        magic, version, *_ = _KEY_HEAD.unpack_from(page, header_bytes)
        if magic == _MAGIC and version != _VERSION:
            raise OtherVersionError(f"it is of version {version}, not {_VERSION}")
    header = describe_header(page)
    if header.element_bytes:
        raise FormatError("its header is that of a packed payload")
    _, _, key_bytes, _ = _KEY_HEAD.unpack_from(page, HEADER_BYTES)
    key = page[_KEY_AT : _KEY_AT + key_bytes]
    if len(key) != key_bytes or page[HEADER_BYTES:] != _key_part(key):
        raise FormatError("its key is damaged")
    if header.stripe_index != 0 or not key.endswith(hash_tag(header.chunk_hash)):
        raise FormatError("its header and its key name different chunks")
    return key, StoredShape(
        header.fingerprint,
        header.metadata.serialize(),
        header.chunk_bytes,
        len(header.chunk_hash),
        header.payload_bytes,
        header.share,
    )


def _key_part(key: bytes) -> bytes:
    """The part of the page after the header."""
    room_bytes = PAGE_BYTES - _KEY_AT
    if len(key) > room_bytes:
        raise OSError(errno.ENAMETOOLONG, f"a key has at most {room_bytes} bytes")
    part = bytearray(PAGE_BYTES - HEADER_BYTES)
    part[_KEY_HEAD.size : _KEY_HEAD.size + len(key)] = key
    _KEY_HEAD.pack_into(part, 0, _MAGIC, _VERSION, len(key), 0)
    _KEY_HEAD.pack_into(part, 0, _MAGIC, _VERSION, len(key), xxh3_64_intdigest(part))
    return bytes(part)
