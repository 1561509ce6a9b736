"""One chunk in one file, byte by byte, and the name of that file.

A preamble of one page, then exactly the payload. Little-endian:

        0  512s  header of a stripe (`lmcache_redis.stripe`) of a chunk in one stripe: its
                 metadata, its length, its hash and the payload's checksum; the layout
                 fingerprint is BLAKE2b-256 of b"lmcr1.disk"
      512  4s    magic b"LMCK"
      516  u16   version, 1
      518  u16   key bytes, n
      520  u64   xxh3-64 of bytes 512 to 4,095, with these eight zero
      528  n     ObjectKey, as in the key of a stripe
    528+n        zeros
    4,096        payload

All that a restart needs stands in the first page, so that a scan reads one page of each file;
whole keys stand there because file names do not give them back. A file is

    <aa>/<digest>-<sequence>.lmcr

digest: BLAKE2b-160 of the ObjectKey with the personalization b"lmcr1.disk", 40 hex digits, and
aa its first two. sequence: 16 hex digits, larger in each later put, so that no name is ever used
twice: what is removed late is never the successor. While it is written it ends in `.lmcr.tmp`.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b

from xxhash import xxh3_64, xxh3_64_intdigest

from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.stripe import (
    HEADER_BYTES,
    STORE_ID_BYTES,
    ChunkFrame,
    describe_header,
)

PREAMBLE_BYTES = 4096
FINGERPRINT = blake2b(b"lmcr1.disk", digest_size=32).digest()

FANOUT_NAME = re.compile(r"[0-9a-f]{2}")
FILE_NAME = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.lmcr")
TEMPORARY_NAME = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.lmcr\.tmp")
TEMPORARY_SUFFIX = ".tmp"

_BLOCK_BYTES = 4096
_KEY_HEAD = struct.Struct("<4sHHQ")
_KEY_MAGIC = b"LMCK"
_KEY_VERSION = 1


def file_path(key: ObjectKey, sequence: int) -> str:
    """Where a chunk lies, relative to the directory of the tier."""
    digest = key_digest(key)
    return f"{digest[:2]}/{digest}-{sequence:016x}.lmcr"


def key_digest(key: ObjectKey) -> str:
    return blake2b(key.to_bytes(), digest_size=20, person=b"lmcr1.disk").hexdigest()


def disk_bytes(payload_bytes: int) -> int:
    """What a file takes from a file system with blocks of 4 KiB."""
    return PREAMBLE_BYTES + -(-payload_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def payload_checksum(views: Sequence[memoryview]) -> int:
    if len(views) == 1:
        return xxh3_64_intdigest(views[0])
    state = xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def pack_preamble(key: ObjectKey, metadata: RemoteMetadata, checksum: int) -> bytearray:
    """The first page of a file. checksum: of the payload."""
    preamble = bytearray(PREAMBLE_BYTES)
    store_id = os.urandom(STORE_ID_BYTES)
    created_unix_ms = max(0, time.time_ns() // 1_000_000)
    _frame(key, metadata).pack_header_into(preamble, 0, store_id, checksum, created_unix_ms)
    preamble[HEADER_BYTES:] = _key_part(key.to_bytes())
    return preamble


def check_preamble(preamble: bytes | bytearray, key: ObjectKey, metadata: RemoteMetadata) -> int:
    """The payload's checksum. Raises FormatError unless this is the page of this very chunk."""
    found = _frame(key, metadata).check_header(preamble, 0)
    if not found.ok:
        raise FormatError(f"its header is {found.verdict.value}")
    if preamble[HEADER_BYTES:] != _key_part(key.to_bytes()):
        raise FormatError("its key is damaged or another")
    return found.checksum


def describe_preamble(preamble: bytes) -> tuple[ObjectKey, RemoteMetadata]:
    """What a file says that it is. Raises FormatError unless all of its first page is whole."""
    if len(preamble) != PREAMBLE_BYTES:
        raise FormatError(f"it ends after {len(preamble)} bytes")
    header = describe_header(preamble)
    if header.fingerprint != FINGERPRINT or header.stripe_count != 1:
        raise FormatError("its header is not of this tier")
    key_bytes = _KEY_HEAD.unpack_from(preamble, HEADER_BYTES)[2]
    start = HEADER_BYTES + _KEY_HEAD.size
    raw = preamble[start : start + key_bytes]
    if len(raw) != key_bytes or preamble[HEADER_BYTES:] != _key_part(raw):
        raise FormatError("its key is damaged")
    key = ObjectKey.from_bytes(raw)
    if key.chunk_hash != header.chunk_hash:
        raise FormatError("its header and its key name different chunks")
    return key, header.metadata


def _frame(key: ObjectKey, metadata: RemoteMetadata) -> ChunkFrame:
    length = metadata.length
    return ChunkFrame(FINGERPRINT, key.chunk_hash, length, length, metadata.serialize())


def _key_part(raw: bytes) -> bytes:
    """From the end of the header to the end of the page."""
    part = bytearray(PREAMBLE_BYTES - HEADER_BYTES)
    part[_KEY_HEAD.size : _KEY_HEAD.size + len(raw)] = raw
    _KEY_HEAD.pack_into(part, 0, _KEY_MAGIC, _KEY_VERSION, len(raw), 0)
    own = xxh3_64_intdigest(part)
    _KEY_HEAD.pack_into(part, 0, _KEY_MAGIC, _KEY_VERSION, len(raw), own)
    return bytes(part)
