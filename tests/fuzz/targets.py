"""What is fuzzed: every decoder of bytes that come from outside, with what must hold.

A target takes one input and says what became of it: ACCEPTED, or the name of one of our own
exceptions or verdicts. Anything else that comes out of it, an AssertionError among others, is
a finding.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from lmcache_redis.errors import FormatError, RedisError, RedisProtocolError
from lmcache_redis.keys import IPCCacheEngineKey, ObjectKey, key_stem, parse_stripe_key, stripe_key
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp.bulk import BulkConnection, Found
from lmcache_redis.resp.stream import PlainStream
from lmcache_redis.resp.verify import verify
from lmcache_redis.resp.wire import ErrorReply, ReplyBuffer, error_of, get_command
from lmcache_redis.stripe import HEADER_BYTES, ChunkFrame, describe_header
from tests.fuzz.mutation import Mutator

ACCEPTED = "accepted"
_FAR_S = 60.0


@dataclass(frozen=True)
class Target:
    """make: an input from a mutator. run: decodes it, and checks what came out."""

    name: str
    good: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    make: Callable[[Mutator], bytes]
    run: Callable[[bytes, Mutator], str]


# ------------------------------------------------------------------ replies

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
)
_REPLY_TOKENS = (
    *(b"+", b"-", b":", b"$", b"*", b"\r\n", b"\r", b"\n", b"0", b"-1", b"1048577"),
    *(b"$5\r\n", b"*65537\r\n", b"_\r\n", b"%1\r\n", b"\x00", b"\xff\xfe", b" ", b"HTTP/1.1 400"),
    *(b"x" * 70_000, b"*1\r\n" * 100, b"9" * 5000),
)


def _run_replies(data: bytes, mutator: Mutator) -> str:
    buffer = ReplyBuffer()
    try:
        buffer.feed(data)
        replies = buffer.take()
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
        in_pieces += again.take()
    assert in_pieces == replies
    assert again.pending_bytes == buffer.pending_bytes
    return "incomplete" if buffer.pending_bytes else ACCEPTED


# --------------------------------------------------- the reader, on a socket

_PAYLOAD = bytes(range(200, 256)) * 5
_HEADER = bytes(range(256)) * 2
_VALUE = _HEADER + _PAYLOAD
_GET = get_command(b"key")
_GUARD = b"\xa5" * 64
_GETS = (
    b"$%d\r\n%b\r\n" % (len(_VALUE), _VALUE),
    b"$-1\r\n",
    b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    b"-LOADING Redis is loading\r\n",
    b"$0\r\n\r\n",
    b"$%d\r\n%b\r\n" % (len(_VALUE) - 1, _VALUE[:-1]),
    b"$%d\r\n%bmore\r\n" % (len(_VALUE) + 4, _VALUE),
    b"$3000\r\n" + b"y" * 3000 + b"\r\n",
)


class _ShortReads(PlainStream):
    """A socket that brings what there is in pieces: no read gets more than `most` bytes."""

    __slots__ = ("most",)

    def ask(self, command: bytes, view: memoryview) -> int:
        return super().ask(command, view[: self.most])

    def receive_some(self, view: memoryview) -> int:
        return super().receive_some(view[: self.most])


class _OneSocket:
    """In the place of a Connector."""

    def __init__(self, sock: socket.socket, most: int) -> None:
        self._stream = _ShortReads(sock, "fuzz", _FAR_S)
        self._stream.most = most

    def open(self, name: str) -> PlainStream:
        return self._stream

    def discard(self, stream: PlainStream) -> None:
        stream.close()


@contextlib.contextmanager
def _connected(data: bytes, mutator: Mutator):  # type: ignore[no-untyped-def]
    """A connection whose peer has said `data` and will say nothing more."""
    ours, peer = socket.socketpair()
    # Whatever does not fit is cut off: then the reply ends there.
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.send(data)
    peer.shutdown(socket.SHUT_WR)
    most = (1, 7, 300, 100_000)[mutator.below(4)] if len(data) < 4096 else 100_000
    connection = BulkConnection(_OneSocket(ours, most), "fuzz")  # type: ignore[arg-type]
    connection.open()
    try:
        yield connection
    finally:
        connection.close()
        peer.close()


def _run_get(data: bytes, mutator: Mutator) -> str:
    guarded = bytearray(_GUARD + bytes(len(_PAYLOAD)) + _GUARD)
    payload = memoryview(guarded)[len(_GUARD) : -len(_GUARD)]
    try:
        with _connected(data, mutator) as connection:
            found = connection.get_stripe(_GET, payload, time.monotonic() + _FAR_S)
            header = bytes(connection.header)
    except RedisError as error:
        return type(error).__name__
    finally:
        assert guarded[: len(_GUARD)] == guarded[-len(_GUARD) :] == _GUARD
    line, _, rest = data.partition(b"\r\n")
    if found is Found.VALUE:
        # Exactly what was sent, and nothing that was not.
        assert line == b"$%d" % len(_VALUE)
        assert rest.startswith(header + bytes(payload) + b"\r\n")
    elif found is Found.OTHER_LENGTH:
        length = int(line[1:])
        assert line == b"$%d" % length, "not as a server writes it"
        assert length not in (-1, len(_VALUE))
        assert rest.startswith(header)
    elif found is Found.NOTHING:
        assert line in (b"$-1", b"_")
    else:
        assert data.startswith(b"-WRONGTYPE")
    return ACCEPTED if found is Found.VALUE else found.name.lower()


def _run_call(data: bytes, mutator: Mutator) -> str:
    """EXISTS, UNLINK, SCAN, PING: whole replies, as many as were asked for."""
    count = 1 + mutator.below(3)
    try:
        with _connected(data, mutator) as connection:
            replies = connection.call(b"PING\r\n", count, time.monotonic() + _FAR_S)
    except RedisError as error:
        return type(error).__name__
    assert len(replies) == count
    return ACCEPTED


# ------------------------------------------------------------------ headers

_CHUNK_HASH = bytes(range(32))
_SHAPES = ((700_000, 300_000), (131_072, 65_536), (1, 4096), (65_535, 1), (1 << 40, 1 << 30))
_FIELDS = ((4, 2), (6, 2), (24, 2), (26, 2), (28, 4), (32, 8), (40, 8), (48, 8), (96, 1), (160, 8))
_METADATA_FIELDS = ((0, 8), (8, 4), (12, 4), (16, 4), (20, 4), (24, 8), (32, 8), (56, 4), (60, 4))
_METADATA_AT = 176


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
            header = bytearray(HEADER_BYTES)
            frame.pack_header_into(header, index, b"s" * 16, index * 7919, 1_767_225_600_000)
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
    check = frame.check_header(data, index)
    if check.ok:
        own = bytearray(HEADER_BYTES)
        created = int.from_bytes(data[160:168], "little")
        frame.pack_header_into(own, index, check.store_id, check.checksum, created)
        assert own == data[:HEADER_BYTES]
    verdict = verify(frame, index, Found.OTHER_LENGTH, memoryview(data), memoryview(b""))
    assert verdict.outcome is not None
    try:
        header = describe_header(data)
    except FormatError:
        return "FormatError"
    # What is described without knowing the chunk is a valid stripe of the chunk it describes.
    last = header.stripe_index == header.stripe_count - 1
    offset, payload = header.payload_offset, header.payload_bytes
    stripe_bytes = offset // header.stripe_index if last and header.stripe_index else payload
    described = ChunkFrame(
        header.fingerprint, header.chunk_hash, header.chunk_bytes, stripe_bytes, data[176:512]
    )
    assert described.check_header(data, header.stripe_index).ok
    return ACCEPTED


_HEADERS = _headers()

# ----------------------------------------------------------- metadata, keys

_METADATA = (
    _metadata(131_072),
    RemoteMetadata(
        64, [(2, 3, 4), (2, 2)], ["bfloat16", "float32"], MemoryFormat.KV_2LTD
    ).serialize(),
    RemoteMetadata(77, [(9,)], ["int64"], MemoryFormat.BINARY).serialize().ljust(336, b"\0"),
    RemoteMetadata(8, [()] * 8, ["int8"] * 8, MemoryFormat.UNDEFINED).serialize(),
)
_BINARY_TOKENS = (b"\0" * 8, b"\xff" * 8, b"\1\0\0\0", b"\x52\x4c\0\0", b"LMCR", b"\x80", b"lmcr1:")


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
    assert not any(data[metadata.encoded_bytes :])
    return ACCEPTED


_NAMESPACE = bytes(range(16))
_KEYS = (
    stripe_key(key_stem(_NAMESPACE, "org/model", 0x02010201, 32) + _CHUNK_HASH, 1),
    stripe_key(key_stem(_NAMESPACE, "m", 0, 1) + b"h", 65_535),
    stripe_key(key_stem(_NAMESPACE, "ü" * 40, 0xFFFF_FFFF, 63) + b"h" * 63, 0),
)


def _run_key(data: bytes, mutator: Mutator) -> str:
    with contextlib.suppress(FormatError):
        assert ObjectKey.from_bytes(data).to_bytes() == data
    try:
        namespace, key, index = parse_stripe_key(data)
    except FormatError:
        return "FormatError"
    stem = key_stem(namespace, key.model_name, key.kv_rank, len(key.chunk_hash))
    assert stripe_key(stem + key.chunk_hash, index) == data
    return ACCEPTED


_ENGINE_KEYS = (
    IPCCacheEngineKey("org/model", 2, None, None, (5, 300), 0, 2, "r1").Serialize(),
    IPCCacheEngineKey("org/model", 2, 1, _CHUNK_HASH).Serialize(),
    IPCCacheEngineKey("m", 255, 254, None, tuple(range(0, 1 << 32, 1 << 27)), 3, 9).Serialize(),
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
    assert IPCCacheEngineKey.Deserialize(key.Serialize()) == key
    return ACCEPTED


TARGETS = (
    Target("replies", _REPLIES, _REPLY_TOKENS, Mutator.next, _run_replies),
    Target("get", _GETS, _REPLY_TOKENS, Mutator.next, _run_get),
    Target("call", _REPLIES, _REPLY_TOKENS, Mutator.next, _run_call),
    Target("header", _HEADERS, _BINARY_TOKENS, _make_header, _run_header),
    Target("metadata", _METADATA, _BINARY_TOKENS, _make_metadata, _run_metadata),
    Target("key", _KEYS, _BINARY_TOKENS, Mutator.next, _run_key),
    Target("engine-key", _ENGINE_KEYS, _MSGPACK_TOKENS, Mutator.next, _run_engine_key),
)
