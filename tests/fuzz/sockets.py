# SPDX-License-Identifier: Apache-2.0
"""Targets that read from a socket: a connection whose peer says something and goes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest

from lmcache_redis import native
from lmcache_redis.chunks import packing
from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    SEAL_AT,
    STORE_ID_BYTES,
    ChunkFrame,
    add_checksums,
    mark_packed,
)
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.bulk import (
    End,
    MoveCall,
    PythonMover,
    Result,
    error_in,
)
from lmcache_redis.resp.codecs import StripeIO, codec_of
from lmcache_redis.resp.lanes import Mover, NativeMover
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.net.wire import get_command
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ReadOutcome
from tests.fuzz.mutation import Mutator
from tests.fuzz.packed import elements_with
from tests.fuzz.target import ACCEPTED

_FAR_S = 60.0
REPLY_TOKENS = (
    *(b"+", b"-", b":", b"$", b"*", b"\r\n", b"\r", b"\n", b"0", b"-1", b"1048577"),
    *(b"$5\r\n", b"*65537\r\n", b"_\r\n", b"%1\r\n", b"\x00", b"\xff\xfe", b" ", b"HTTP/1.1 400"),
    *(b"x" * 70_000, b"*1\r\n" * 100, b"9" * 5000),
)

_PAYLOAD = elements_with([112 + n % 7 for n in range(packing.TILE)], 2) + b"tail"
_ROOM = bytearray(len(_PAYLOAD))
_STORED = bytes(_ROOM[: packing.pack(_PAYLOAD, 2, _ROOM)])
_HEADER = bytes(range(256)) * 2 + bytes(range(128))
_VALUE = _HEADER + _PAYLOAD
_GET = get_command(b"key")
_SEAL_KEYS = SealKeys([bytes(range(32))])
_GUARD = b"\xa5" * 64
_OTHERS = (
    b"$-1\r\n",
    b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    b"-LOADING Redis is loading\r\n",
    b"$0\r\n\r\n",
    b"$%d\r\n%b\r\n" % (len(_VALUE) - 1, _VALUE[:-1]),
    b"$%d\r\n%bmore\r\n" % (len(_VALUE) + 4, _VALUE),
    b"$3000\r\n" + b"y" * 3000 + b"\r\n",
)


class _ShortReads(Connection):
    """A socket that brings what there is in pieces: no read gets more than `most` bytes."""

    most = 0

    def receive_some(self, view: memoryview) -> int:
        return super().receive_some(view[: self.most])


@contextlib.contextmanager
def _connected(data: bytes, most: int = 100_000) -> Iterator[Connection]:
    """A connection whose peer has said `data` and will say nothing more."""
    ours, peer = socket.socketpair()
    # Whatever does not fit is cut off: then the reply ends there.
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.send(data)
    peer.shutdown(socket.SHUT_WR)
    connection = _ShortReads(ours, Endpoint(Transport.TCP, "fuzz", 1), _FAR_S)
    connection.most = most
    try:
        yield connection
    finally:
        connection.close()
        peer.close()


def _most(data: bytes, mutator: Mutator) -> int:
    return (1, 7, 300, 100_000)[mutator.below(4)] if len(data) < 4096 else 100_000


def run_call(data: bytes, mutator: Mutator) -> str:
    """EXISTS, UNLINK, SCAN, PING: whole replies, as many as were asked for."""
    count = 1 + mutator.below(3)
    try:
        with _connected(data, _most(data, mutator)) as connection:
            replies = connection.call(b"PING\r\n", count, time.monotonic() + _FAR_S)
    except RedisError as error:
        return type(error).__name__
    assert len(replies) == count
    return ACCEPTED


# ------------------------------ the native extension, against the same in Python

_FRAME = ChunkFrame(
    bytes(range(32)),
    b"hash",
    2 * len(_PAYLOAD),
    len(_PAYLOAD),
    RemoteMetadata(
        2 * len(_PAYLOAD), [(2 * len(_PAYLOAD),)], ["uint8"], MemoryFormat.PAGES
    ).serialize(),
)
_CHECKED_FIELDS = ((0, 4), (4, 2), (8, 16), (24, 2), (32, 8), (48, 8), (56, 8), (64, 32), (160, 8))
_STORED_FIELDS = ((176, 1), (177, 1), (178, 6), (184, 8), (192, 8), (200, 8), (544, 48))
_SEALED_FIELDS = ((28, 1), (SEAL_AT, 8), (SEAL_AT + 8, 24), (SEAL_AT + 32, 16))


def _stripe(index: int, change: tuple[int, bytes] | None = None, stored: bytes = _PAYLOAD) -> bytes:
    """A reply with stripe `index`, its checksum right whatever was changed in the header."""
    header = bytearray(_FRAME.bare_header(index, b"s" * 16, 1))
    if stored is not _PAYLOAD:
        mark_packed(header, 2, len(stored))
    add_checksums(header, xxh3_64_intdigest(stored))
    if change is not None:
        at, data = change
        header[at : at + len(data)] = data
        header[168:176] = bytes(8)
        header[168:176] = xxh3_64_intdigest(header).to_bytes(8, "little")
    return b"$%d\r\n%b%b\r\n" % (HEADER_BYTES + len(stored), header, stored)


STRIPES = (
    *(
        _stripe(1, change, stored)
        for change in (None, (28, b"\1"))
        for stored in (_PAYLOAD, _STORED)
    ),
    *_OTHERS,
)


def make_stripe(mutator: Mutator) -> bytes:
    """Some as they should be but for one field of the header."""
    if mutator.below(3):
        return mutator.next()
    fields = _CHECKED_FIELDS + _STORED_FIELDS + _SEALED_FIELDS
    at, nbytes = fields[mutator.below(len(fields))]
    stored = (_PAYLOAD, _STORED, _STORED[:-1])[mutator.below(3)]
    return _stripe(mutator.below(2), (at, mutator.number(nbytes)), stored)


def run_compiled(data: bytes, mutator: Mutator) -> str:
    """Whatever comes, it ends as it would in Python, where sealed values are expected or not."""
    is_sealed = bool(mutator.below(2))
    ends: list[tuple[str, ReadOutcome | bytes | None]] = []
    is_unread = False
    movers: list[Mover] = [PythonMover()]
    if native.moves is not None:
        movers.append(NativeMover())
    for mover in movers:
        guarded = [bytearray(_GUARD + bytes(len(_PAYLOAD)) + _GUARD) for _ in range(2)]
        slot, room = (memoryview(each)[len(_GUARD) : -len(_GUARD)] for each in guarded)
        with _connected(data, _most(data, mutator)) as connection:
            ends.append(_load(mover, connection, slot, room, is_sealed))
            is_unread |= _is_unread(connection)
        for each in guarded:
            assert each[: len(_GUARD)] == each[-len(_GUARD) :] == _GUARD
        assert ends[-1][0] != ACCEPTED or slot == _PAYLOAD or is_sealed
    # Bytes behind a reply end the connection where they came together with its own.
    assert ends[0] == ends[-1] or (is_unread and "RedisProtocolError" in (ends[0][0], ends[-1][0]))
    return ends[0][0]


def _is_unread(connection: Connection) -> bool:
    with socket.socket(fileno=os.dup(connection.plain_fileno)) as sock:
        try:
            return bool(sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return False


def _load(
    mover: Mover, connection: Connection, slot: memoryview, room: memoryview, is_sealed: bool
) -> tuple[str, ReadOutcome | bytes | None]:
    head = b"$%d\r\n" % (HEADER_BYTES + len(_PAYLOAD))
    task = (_GET, head + _FRAME.bare_header(1, is_sealed=is_sealed), slot, room)
    lanes = [mover.handle(connection)]
    deadline = time.monotonic() + _FAR_S
    done: Sequence[Result] = ()
    while not done:
        # As if sent: the peer may be gone. A busy machine takes more than one call.
        call = MoveCall(lanes, [task], 1, False, True, deadline, not is_sealed)
        done = mover.move(call, is_load=True).done
    (result,) = done
    if isinstance(result, bytes):
        # A sealed one has yet to be opened.
        assert len(result) == (HEADER_BYTES if is_sealed else STORE_ID_BYTES)
        return ACCEPTED, result
    codec = codec_of(_SEAL_KEYS if is_sealed else None)
    found = codec.judge(StripeIO(b"", _FRAME, 1, slot), result)
    if found is not None:
        return ACCEPTED if isinstance(found, bytes) else found.name.lower(), found
    error = error_in(result, connection)
    assert error is not None
    assert End(result[0]) is not End.MISMATCH
    return type(error).__name__, None
