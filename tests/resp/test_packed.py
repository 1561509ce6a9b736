# SPDX-License-Identifier: Apache-2.0
"""Packed payloads, by each mover: received beside the slot, verified, and unpacked into it."""

from __future__ import annotations

import errno
import functools
import random
import socket
import struct
import threading

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    SHORT_BYTES,
    ChunkFrame,
    add_checksums,
    mark_packed,
)
from lmcache_redis.chunks.packing import pack
from lmcache_redis.resp.bulk import End, Moved, Request, Result
from lmcache_redis.resp.lanes import Mover
from tests.fuzz.packed import elements_with
from tests.resp.test_bulk import (
    COMMAND,
    STORE_ID,
    Lanes,
    failure_of,
    frame_of,
    load_one,
    reply_with,
    value_of,
)
from tests.resp.test_bulk import mover as mover

GUARD = b"\xa5" * 64
# The packed form of the first is in the first piece that is received of a reply.
TINY, SMALL, LARGE = 4_301, 10_001, 300_000


@functools.cache
def plain_of(nbytes: int, seed: int = 1) -> bytes:
    """bf16 numbers of a narrow range."""
    highs = random.Random(seed).choices(range(110, 122), k=nbytes // 2)
    return elements_with(highs, 2) + b"x" * (nbytes % 2)


@functools.cache
def packed_of(plain: bytes) -> bytes:
    room = bytearray(len(plain))
    stored = bytes(room[: pack(plain, 2, room)])
    assert len(stored) < 0.8 * len(plain)
    return stored


def packed_value(
    stored: bytes,
    frame: ChunkFrame,
    index: int = 0,
    *,
    checksum: int | None = None,
    plain_checksum: int = 0,
) -> bytearray:
    header = bytearray(frame.bare_header(index, STORE_ID, 1234))
    mark_packed(header, 2, len(stored), plain_checksum)
    add_checksums(header, xxh3_64_intdigest(stored) if checksum is None else checksum)
    return header + stored


class Slot:
    """A slot and room for what is packed, with guards around them."""

    def __init__(
        self, frame: ChunkFrame, room_bytes: int | None = None, is_sealed: bool = False
    ) -> None:
        self.nbytes = frame.stripe_payload_bytes
        self._all = [
            bytearray(GUARD + bytes(nbytes) + GUARD)
            for nbytes in (self.nbytes, self.nbytes if room_bytes is None else room_bytes)
        ]
        self.slot, self.room = (memoryview(each)[len(GUARD) : -len(GUARD)] for each in self._all)
        bare = frame.bare_header(0, is_sealed=is_sealed)
        expected = b"$%d\r\n" % (HEADER_BYTES + self.nbytes) + bare
        self.request: Request = (COMMAND, expected, self.slot, self.room)

    def check_guards(self) -> None:
        for each in self._all:
            assert each[: len(GUARD)] == each[-len(GUARD) :] == GUARD


def send_all(server: socket.socket, data: bytes, piece: int) -> threading.Thread:
    def send() -> None:
        for at in range(0, len(data), piece):
            server.sendall(data[at : at + piece])

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("piece", [1 << 30, 5_000])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_it_comes_back_in_its_slot(mover: Mover, nbytes: int, piece: int) -> None:
    plain, frame = plain_of(nbytes), frame_of(nbytes)
    into = Slot(frame)
    with Lanes(mover, 1) as lanes:
        for value in (packed_value(packed_of(plain), frame), value_of(0, plain, frame)):
            into.slot[:] = bytes(nbytes)
            thread = send_all(lanes.servers[0], reply_with(bytes(value)), piece)
            assert lanes.load_one(into.request) == STORE_ID
            thread.join()
            assert into.slot == plain
            assert lanes.connections[0]._is_quiet()
    into.check_guards()


@pytest.mark.parametrize(("nbytes", "is_packed"), [(256, False), (TINY, True), (SMALL, True)])
@pytest.mark.parametrize("end", ["late", "lost"])
def test_a_reply_that_stops_anywhere(mover: Mover, end: str, nbytes: int, is_packed: bool) -> None:
    """The next call goes on at that byte; or the connection is lost.

    After every byte around the borders of length, header, payload and end, and some between.
    """
    plain, frame = plain_of(nbytes), frame_of(nbytes)
    value = packed_value(packed_of(plain), frame) if is_packed else value_of(0, plain, frame)
    reply = reply_with(bytes(value))
    head = reply.index(b"LMCR")
    cuts = [*range(12), *range(12, head + HEADER_BYTES, 97), len(reply) // 2]
    cuts += [*range(head + HEADER_BYTES - 2, head + HEADER_BYTES + 3)]
    cuts += [cut for cut in (4095, 4096, 4097) if cut < len(reply)]
    cuts += [*range(len(reply) - 4, len(reply))]
    for cut in cuts:
        into = Slot(frame)
        with Lanes(mover, 1) as lanes:
            lanes.servers[0].sendall(reply[:cut])
            if end == "lost":
                lanes.servers[0].shutdown(socket.SHUT_WR)
                assert failure_of(lanes.load_one(into.request))[0] == End.LOST
                continue
            moved = lanes.load([into.request])
            while moved.sending == errno.EAGAIN:  # a call may end early on a busy machine
                moved = lanes.load([into.request], 1, is_sending=True)
            assert moved == Moved([0], [], 0)
            lanes.servers[0].sendall(reply[cut:])
            assert lanes.load_one(into.request, 1) == STORE_ID
        assert into.slot == plain
        into.check_guards()


def ends(mover: Mover, value: bytes, into: Slot) -> Result:
    result = load_one(mover, reply_with(value), into.request)
    into.check_guards()
    return result


@pytest.mark.parametrize("verify", [True, False])
def test_it_is_what_was_packed(mover: Mover, verify: bool) -> None:
    """If the header says what that was. Somebody has packed something else, with good checksums."""
    plain, frame = plain_of(SMALL), frame_of(SMALL)
    for checksum, is_good in ((xxh3_64_intdigest(plain), True), (0, True), (1, False)):
        value = packed_value(packed_of(plain), frame, plain_checksum=checksum)
        into = Slot(frame)
        with Lanes(mover, 1) as lanes:
            lanes.servers[0].sendall(reply_with(bytes(value)))
            result = lanes.load_one(into.request, verify=verify)
        if is_good or not verify:
            assert result == STORE_ID
            assert into.slot == plain
        else:
            assert failure_of(result)[0] == End.MISMATCH
        into.check_guards()


def test_what_is_damaged_or_no_packed_form_is_a_mismatch(mover: Mover) -> None:
    """Of the latter the checksum is right: somebody has stored it so."""
    frame, stored = frame_of(SMALL), packed_of(plain_of(SMALL))
    wrong = (stored[:-1], stored + b"\0", b"\xff" * 9_000, bytes(9_000))
    values = [packed_value(each, frame) for each in wrong]
    for at in (0, 700, 5_000, -1):
        damaged = bytearray(stored)
        damaged[at] ^= 1
        values.append(packed_value(stored, frame)[:HEADER_BYTES] + damaged)
    for value in values:
        result = ends(mover, bytes(value), Slot(frame))
        assert result == (End.MISMATCH, 0, value[:HEADER_BYTES])


def test_what_was_not_asked_for_ends_the_connection(mover: Mover) -> None:
    plain = plain_of(SMALL)
    frame, stored = frame_of(SMALL), packed_of(plain_of(SMALL))
    good = packed_value(stored, frame)

    def changed(at: int, data: bytes) -> bytes:
        value = bytearray(good)
        value[at : at + len(data)] = data
        value[168:176] = bytes(8)
        value[168:176] = xxh3_64_intdigest(bytes(value[:HEADER_BYTES])).to_bytes(8, "little")
        return bytes(value)

    others = {
        "another stripe": bytes(packed_value(stored, frame, 1)),
        "another chunk": bytes(packed_value(stored, frame_of(SMALL, 4))),
        "codec": changed(176, b"\2"),
        "plain": changed(176, bytes(8)),
        "element bytes": changed(177, b"\3"),
        "zeros": changed(183, b"\1"),
        "another length": changed(184, struct.pack("<Q", len(stored) - 1)),
        "a damaged header": bytes(good[:400] + b"?" + good[401:]),
        "short": bytes(packed_value(stored[:SHORT_BYTES], frame)),
    }
    for what, value in others.items():
        result = ends(mover, value, Slot(frame))
        assert result == (End.OTHER_LENGTH, 0, value[:HEADER_BYTES]), what
    value = bytes(good)
    for room_bytes in (0, len(stored) - 1):
        assert ends(mover, value, Slot(frame, room_bytes)) == (
            End.OTHER_LENGTH, 0, value[:HEADER_BYTES]
        )  # fmt: skip
    assert ends(mover, value, Slot(frame, len(stored))) == STORE_ID
    # A packed header before as many bytes as a plain payload has.
    value = changed(184, struct.pack("<Q", SMALL))[:HEADER_BYTES] + plain
    assert failure_of(ends(mover, value, Slot(frame)))[0] == End.MISMATCH


@pytest.mark.parametrize("piece", [700, 1 << 30])
@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_of_the_other_kind_leaves_the_connection(
    mover: Mover, size: int, is_sealed: bool, piece: int
) -> None:
    """A sealed value for a reader without keys, or the reverse: the next reply is in step."""
    frame, stored = frame_of(size), packed_of(plain_of(size))
    header = bytearray(frame.bare_header(0, STORE_ID, 1234, is_sealed=is_sealed))
    mark_packed(header, 2, len(stored))
    add_checksums(header, xxh3_64_intdigest(stored))
    into = Slot(frame, 0 if not is_sealed else None, is_sealed=not is_sealed)
    good = Slot(frame)
    with Lanes(mover, 1) as lanes:
        thread = send_all(lanes.servers[0], reply_with(bytes(header) + stored), piece)
        assert lanes.load_one(into.request) == (End.MISMATCH, 0, header)
        thread.join()
        thread = send_all(lanes.servers[0], reply_with(bytes(packed_value(stored, frame))), piece)
        assert lanes.load_one(good.request) == STORE_ID
        thread.join()
    assert good.slot == plain_of(size)
    into.check_guards()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_bytes_behind_it_are_garbage(mover: Mover, size: int) -> None:
    frame = frame_of(size)
    value = bytes(packed_value(packed_of(plain_of(size)), frame))
    reply = b"$%d\r\n%bxx" % (len(value), value)
    into = Slot(frame)
    with Lanes(mover, 1) as lanes:
        thread = send_all(lanes.servers[0], reply, 1 << 30)
        assert failure_of(lanes.load_one(into.request))[0] == End.GARBAGE
        thread.join()
    into.check_guards()


def test_many_share_a_room(mover: Mover) -> None:
    """Replies arrive one by one."""
    frame = frame_of(LARGE)
    plains = [plain_of(LARGE, seed) for seed in range(3)]
    slots = [Slot(frame) for _ in plains]
    requests = [(*each.request[:3], slots[0].room) for each in slots]
    with Lanes(mover, 3) as lanes:
        threads = [
            send_all(server, reply_with(bytes(packed_value(packed_of(plain), frame))), 90_000)
            for server, plain in zip(lanes.servers, plains, strict=True)
        ]
        done: list[Result] = []
        in_flight = 0
        while len(done) < 3:
            moved = lanes.load(requests[len(done) :], in_flight)
            done += moved.done
            in_flight += len(moved.lanes) - len(moved.done)
            lanes.handles = lanes.handles[len(moved.done) :]
        for thread in threads:
            thread.join()
    assert done == [STORE_ID] * 3
    assert [bytes(each.slot) for each in slots] == plains


def test_a_read_only_room_is_refused(mover: Mover) -> None:
    frame = frame_of(SMALL)
    request = (*Slot(frame).request[:3], bytes(SMALL))
    value = bytes(packed_value(packed_of(plain_of(SMALL)), frame))
    with pytest.raises((BufferError, TypeError)):
        load_one(mover, reply_with(value), request)
