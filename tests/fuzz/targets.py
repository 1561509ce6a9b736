# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: every decoder of bytes that come from outside, with what must hold.

A target takes one input and says what became of it: ACCEPTED, or the name of one of our own
exceptions or verdicts. Anything else that comes out of it, an AssertionError among others, is
a finding.
"""

from __future__ import annotations

import contextlib
from unittest import mock

from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    SEAL_AT,
    SEALED,
    ChunkFrame,
    add_checksums,
    describe_header,
    mark_packed,
    stored_form,
)
from lmcache_redis.chunks.keys import ObjectKey, hash_tag
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem, parse_stripe_key, stripe_key
from lmcache_redis.compat.custom_types import IPCCacheEngineKey
from lmcache_redis.errors import FormatError, RedisError, RedisProtocolError
from lmcache_redis.resp.bulk import End
from lmcache_redis.resp.codecs import StripeIO, codec_of
from lmcache_redis.resp.net.wire import ErrorReply, ReplyBuffer, error_of
from lmcache_redis.seal import Opened, SealKeys
from lmcache_redis.tiers import ReadOutcome
from tests.fuzz.mutation import Mutator
from tests.fuzz.packed import PACKED
from tests.fuzz.sockets import (
    REPLY_TOKENS,
    STRIPES,
    make_stripe,
    run_call,
    run_compiled,
)
from tests.fuzz.target import ACCEPTED, Target

# ------------------------------------------------------------------ replies

_MOST_REPLIES = 1000
_REPLIES = (
    b"+OK\r\n",
    b":12\r\n:-3\r\n",
    b"$3\r\na\r\n\r\n",
    b"$-1\r\n",
    b"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n",
    b"-ERR no\r\n",
    b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"*-1\r\n*0\r\n",
    b"*3\r\n:1\r\n$5\r\nhello\r\n*1\r\n+x\r\n",
    b"$9\r\n*12345678\r\n*2\r\n:1\r\n$8\r\n~1234567\r\n",
    b"%1\r\n+a\r\n,1.5\r\n~2\r\n#t\r\n#f\r\n(123\r\n_\r\n=7\r\ntxt:abc\r\n>1\r\n+x\r\n",
)


def _run_replies(data: bytes, mutator: Mutator) -> str:
    buffer = ReplyBuffer()
    try:
        buffer.feed(data)
        replies = buffer.take(_MOST_REPLIES)
    except RedisProtocolError:
        return "RedisProtocolError"
    for reply in replies:
        if isinstance(reply, ErrorReply):
            assert isinstance(error_of(reply), RedisError)
    # However the bytes arrive, they say the same.
    again = ReplyBuffer()
    in_pieces = []
    for piece in mutator.pieces(data):
        again.feed(piece)
        in_pieces += again.take(_MOST_REPLIES)
    assert in_pieces == replies
    assert again.has_rest == buffer.has_rest
    return "incomplete" if buffer.has_rest else ACCEPTED


# ------------------------------------------------------------------ headers

_CHUNK_HASH = bytes(range(32))
_SHAPES = ((700_000, 300_000), (131_072, 65_536), (1, 4096), (65_535, 1), (1 << 40, 1 << 30))
_FIELDS = ((4, 2), (6, 2), (24, 2), (26, 2), (28, 4), (32, 8), (40, 8), (48, 8), (96, 1), (160, 8))
_FIELDS = (*_FIELDS, (176, 1), (177, 1), (178, 6), (184, 8), (192, 8), (200, 8), (544, 4))
_METADATA_FIELDS = ((0, 8), (8, 4), (12, 4), (16, 4), (20, 4), (24, 8), (32, 8), (56, 4), (60, 4))
_METADATA_AT = 208


def _metadata(length: int) -> bytes:
    return RemoteMetadata(length, [(length,)], ["uint8"], MemoryFormat.PAGES).serialize()


_FRAMES = tuple(
    ChunkFrame(bytes(range(32, 64)), _CHUNK_HASH, chunk_bytes, stripe_bytes, _metadata(chunk_bytes))
    for chunk_bytes, stripe_bytes in _SHAPES
)


def _headers() -> tuple[bytes, ...]:
    made = []
    for frame in _FRAMES:
        for index in {0, frame.stripe_count // 2, frame.stripe_count - 1}:
            header = frame.header(index, b"s" * 16, index * 7919, 1_767_225_600_000)
            made.append(bytes(header))
    return tuple(made)


def _make_header(mutator: Mutator) -> bytes:
    """Half of them with fields replaced and the checksum right, so as to get past it."""
    if mutator.below(2):
        return mutator.next()
    header = bytearray(mutator.pick(_HEADERS))
    for _ in range(1 + mutator.below(3)):
        fields, base = (_FIELDS, 0) if mutator.below(2) else (_METADATA_FIELDS, _METADATA_AT)
        at, nbytes = fields[mutator.below(len(fields))]
        header[base + at : base + at + nbytes] = mutator.number(nbytes)
    header[168:176] = bytes(8)
    header[168:176] = xxh3_64_intdigest(header).to_bytes(8, "little")
    return bytes(header)


def _run_header(data: bytes, mutator: Mutator) -> str:
    frame = _FRAMES[mutator.below(len(_FRAMES))]
    index = mutator.below(min(frame.stripe_count, 4))
    is_sealed = bool(mutator.below(2))
    check = frame.check_header(data, index, is_sealed)
    if check.ok:
        created = int.from_bytes(data[160:168], "little")
        own = frame.header(index, check.store_id, check.checksum, created)
        own[168:176], own[192:208] = data[168:176], data[192:208]
        if check.element_bytes:
            mark_packed(own, check.element_bytes, check.stored_bytes)
            assert 0 < check.stored_bytes < stored_form(frame.bare_header(index))[0]
        if is_sealed:
            own[28] |= SEALED
            own[SEAL_AT:] = data[SEAL_AT:HEADER_BYTES]
        assert own == data[:HEADER_BYTES]
    failure = (End.OTHER_LENGTH, 0, data)
    codec = codec_of(_SEAL_KEYS if is_sealed else None)
    verdict = codec.judge(StripeIO(b"", frame, index, memoryview(b"")), failure)
    assert isinstance(verdict, ReadOutcome)
    try:
        header = describe_header(data)
    except FormatError:
        return "FormatError"
    # What is described without knowing the chunk is a valid stripe of the chunk it describes.
    last = header.stripe_index == header.stripe_count - 1
    offset, payload = header.payload_offset, header.payload_bytes
    stripe_bytes = offset // header.stripe_index if last and header.stripe_index else payload
    is_sealed = header.sealed_with is not None
    described = ChunkFrame(
        header.fingerprint,
        header.chunk_hash,
        header.chunk_bytes,
        stripe_bytes,
        data[208:544],
        header.share,
    )
    assert described.check_header(data, header.stripe_index, is_sealed).ok
    return ACCEPTED


_HEADERS = _headers()

# ------------------------------------------------------------- sealed values

_SEAL_KEYS = SealKeys([bytes(range(32)), bytes(range(1, 33))])
_SEALED_KEY = b"lmcr2:a stripe"
_PLAINTEXT = bytes(range(256))
_SEALED_FRAME = ChunkFrame(bytes(range(32, 64)), _CHUNK_HASH, 256, 256, _metadata(256))
_SEAL_FIELDS = ((SEAL_AT, 8), (SEAL_AT + 8, 24), (SEAL_AT + 32, 16), (HEADER_BYTES, 16))
# Both are filled in after the payload was sealed.
_CHECKSUMS = (slice(56, 64), slice(168, 176))


def _sealed_value() -> bytes:
    header = bytearray(_SEALED_FRAME.bare_header(0, b"s" * 16, 1, is_sealed=True))
    room = memoryview(bytearray(len(_PLAINTEXT)))
    with mock.patch("os.urandom", bytes):  # a finding can be repeated
        payload = _SEAL_KEYS.seal(_SEALED_KEY, header, memoryview(_PLAINTEXT), room)
    add_checksums(header, xxh3_64_intdigest(payload))
    return bytes(header) + bytes(payload)


def _make_sealed(mutator: Mutator) -> bytes:
    """Some as they were sealed, some with another field and right checksums."""
    value = bytearray(_SEALED_VALUE)
    choice = mutator.below(4)
    if choice == 1:
        return mutator.next()
    if choice:
        at, nbytes = (*_FIELDS, *_SEAL_FIELDS)[mutator.below(len(_FIELDS) + len(_SEAL_FIELDS))]
        value[at : at + nbytes] = mutator.number(nbytes)
    header = value[:HEADER_BYTES]
    add_checksums(header, xxh3_64_intdigest(value[HEADER_BYTES:]))
    return bytes(header + value[HEADER_BYTES:])


def _run_sealed(data: bytes, mutator: Mutator) -> str:
    """Only what was sealed is opened, whoever made the checksums right."""
    header = data[:HEADER_BYTES]
    check = _SEALED_FRAME.check_header(header, 0, is_sealed=True)
    if not check.ok:
        return check.verdict.name.lower()
    payload = bytearray(data[HEADER_BYTES:])
    opened = _SEAL_KEYS.open(_SEALED_KEY, header, memoryview(payload))
    changed, original = bytearray(data), bytearray(_SEALED_VALUE)
    for field in _CHECKSUMS:
        changed[field] = original[field] = bytes(8)
    assert (opened is Opened.OK) == (changed == original)
    if opened is not Opened.OK:
        return opened.name.lower()
    assert payload == _PLAINTEXT
    return ACCEPTED


_SEALED_VALUE = _sealed_value()

# ----------------------------------------------------------- metadata, keys

_METADATA = (
    _metadata(131_072),
    RemoteMetadata(
        64, [(2, 3, 4), (2, 2)], ["bfloat16", "float32"], MemoryFormat.KV_2LTD
    ).serialize(),
    RemoteMetadata(77, [(9,)], ["int64"], MemoryFormat.BINARY).serialize().ljust(336, b"\0"),
    RemoteMetadata(8, [()] * 8, ["int8"] * 8, MemoryFormat.UNDEFINED).serialize(),
)
_BINARY_TOKENS = (b"\0" * 8, b"\xff" * 8, b"\1\0\0\0", b"\x52\x4c\0\0", b"LMCR", b"\x80", b"lmcr2:")


def _make_metadata(mutator: Mutator) -> bytes:
    if mutator.below(2):
        return mutator.next()
    data = bytearray(mutator.pick(_METADATA))
    at, nbytes = _METADATA_FIELDS[mutator.below(len(_METADATA_FIELDS))]
    data[at : at + nbytes] = mutator.number(nbytes)
    return bytes(data)


def _run_metadata(data: bytes, mutator: Mutator) -> str:
    try:
        metadata = RemoteMetadata.deserialize(data)
    except FormatError:
        return "FormatError"
    assert RemoteMetadata.deserialize(metadata.serialize()) == metadata
    assert not any(data[len(metadata.serialize()) :])
    return ACCEPTED


_NAMESPACE = bytes(range(16))
_KEYS = (
    stripe_key(key_stem(_NAMESPACE, "org/model", 0x02010201, 32) + hash_tag(_CHUNK_HASH), 1),
    stripe_key(key_stem(_NAMESPACE, "m", 0, 1) + hash_tag(b"h"), 65_535),
    stripe_key(key_stem(_NAMESPACE, "ü" * 40, 0xFFFF_FFFF, 63) + hash_tag(b"h" * 63), 0),
)


def _run_key(data: bytes, mutator: Mutator) -> str:
    with contextlib.suppress(FormatError):
        assert ObjectKey.from_bytes(data).to_bytes() == data
    try:
        namespace, key, index = parse_stripe_key(data)
    except FormatError:
        return "FormatError"
    stem = key_stem(namespace, key.model_name, key.kv_rank, len(key.chunk_hash))
    assert stripe_key(stem + hash_tag(key.chunk_hash), index) == data
    return ACCEPTED


_ENGINE_KEYS = (
    IPCCacheEngineKey.Serialize(
        IPCCacheEngineKey("org/model", 2, None, None, (5, 300), 0, 2, "r1")
    ),
    IPCCacheEngineKey.Serialize(IPCCacheEngineKey("org/model", 2, 1, _CHUNK_HASH)),
    IPCCacheEngineKey.Serialize(
        IPCCacheEngineKey("m", 255, 254, None, tuple(range(0, 1 << 32, 1 << 27)), 3, 9)
    ),
)
_MSGPACK_TOKENS = (
    *(b"\xc0", b"\xc2", b"\x90", b"\x98", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3" + b"\xff" * 8, b"\xcb" + b"\x7f" * 8, b"\xc7\x0c\xff"),
    *(b"\xa1\xff", b"\x91" * 2000, b"\xd6\xff" + b"\xff" * 4, b"\x81\xa1a\x01"),
)


def _run_engine_key(data: bytes, mutator: Mutator) -> str:
    try:
        key = IPCCacheEngineKey.Deserialize(data)
    except FormatError:
        return "FormatError"
    assert IPCCacheEngineKey.Deserialize(IPCCacheEngineKey.Serialize(key)) == key
    return ACCEPTED


TARGETS = (
    Target("replies", _REPLIES, REPLY_TOKENS, Mutator.next, _run_replies),
    Target("compiled", STRIPES, REPLY_TOKENS, make_stripe, run_compiled),
    Target("call", _REPLIES, REPLY_TOKENS, Mutator.next, run_call),
    Target("header", _HEADERS, _BINARY_TOKENS, _make_header, _run_header),
    Target("sealed", (_SEALED_VALUE,), _BINARY_TOKENS, _make_sealed, _run_sealed),
    Target("metadata", _METADATA, _BINARY_TOKENS, _make_metadata, _run_metadata),
    Target("key", _KEYS, _BINARY_TOKENS, Mutator.next, _run_key),
    Target("engine-key", _ENGINE_KEYS, _MSGPACK_TOKENS, Mutator.next, _run_engine_key),
    PACKED,
)
