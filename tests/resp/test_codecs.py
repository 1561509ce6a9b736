# SPDX-License-Identifier: Apache-2.0
"""What a codec says of any value, sealed or plain, without a server."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, ChunkFrame, add_checksums
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.resp.codecs import Codec, Found, Plain, Sealed, StripeIO
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ReadOutcome
from tests.resp.helpers import FINGERPRINT, Chunk

SLOT = 4096
SIZE = 5 * SLOT - 100
STRIPES = (0, 2, 4)
KEYS = SealKeys([b"\x01" * 32])
STORE_ID = b"s" * 16
CORRUPT, FOREIGN = ReadOutcome.CORRUPT, ReadOutcome.FOREIGN
NOT_OPENED = ReadOutcome.NOT_OPENED

Change = Callable[[bytearray], object]


def value_of(codec: Codec, chunk: Chunk, index: int) -> bytearray:
    """As a server has it."""
    return packed(codec, StripeIO.of(chunk.io(), index))


def packed(codec: Codec, stripe: StripeIO) -> bytearray:
    header, stored = codec.pack(stripe, STORE_ID, 1)
    add_checksums(header, xxh3_64_intdigest(stored))
    return header + stored


def with_right_checksums(value: bytearray) -> bytes:
    """As anyone can make them."""
    value[56:64] = xxh3_64_intdigest(value[HEADER_BYTES:]).to_bytes(8, "little")
    value[168:176] = bytes(8)
    value[168:176] = xxh3_64_intdigest(value[:HEADER_BYTES]).to_bytes(8, "little")
    return bytes(value)


def placed(codec: Codec, value: bytes | None, index: int) -> Found:
    """What is found for a stripe of chunk 1."""
    into = Chunk(1, SIZE, SLOT)
    stripe = StripeIO.of(into.io(), index)
    found = codec.place(stripe, value)
    into.check_guards()
    if found == STORE_ID:
        assert into.slots[index] == Chunk(1, SIZE, SLOT, seed=1).slots[index]
    return found


def flip(at: int) -> Change:
    def change(value: bytearray) -> None:
        value[at] ^= 0x10

    return change


# A field, and what a reader of sealed values makes of another value with right checksums.
FIELDS = {
    "magic": (0, FOREIGN),
    "version": (4, FOREIGN),
    "header bytes": (6, CORRUPT),
    "store id": (10, CORRUPT),
    "stripe index": (24, FOREIGN),
    "stripe count": (26, FOREIGN),
    "flags": (29, FOREIGN),
    "payload bytes": (33, FOREIGN),
    "payload offset": (41, FOREIGN),
    "chunk bytes": (49, FOREIGN),
    "fingerprint": (64, FOREIGN),
    "hash length": (96, FOREIGN),
    "hash": (100, FOREIGN),
    "time": (160, CORRUPT),
    "metadata": (180, FOREIGN),
    "its padding": (460, FOREIGN),
    "key id": (SEAL_AT, NOT_OPENED),
    "nonce": (SEAL_AT + 8, CORRUPT),
    "end of the nonce": (SEAL_AT + 31, CORRUPT),
    "tag": (SEAL_AT + 32, CORRUPT),
    "end of the tag": (HEADER_BYTES - 1, CORRUPT),
    "payload": (HEADER_BYTES, CORRUPT),
    "middle of the payload": (HEADER_BYTES + 2000, CORRUPT),
    "end of the payload": (-1, CORRUPT),
}


@pytest.mark.parametrize(("at", "outcome"), FIELDS.values(), ids=FIELDS)
def test_a_forged_field_of_a_sealed_value(at: int, outcome: ReadOutcome) -> None:
    codec, chunk = Sealed(KEYS), Chunk(1, SIZE, SLOT, seed=1)
    for index in STRIPES:
        value = value_of(codec, chunk, index)
        assert placed(codec, bytes(value), index) == STORE_ID
        flip(at)(value)
        assert placed(codec, with_right_checksums(value), index) is outcome


def test_a_seal_that_nobody_made() -> None:
    """The header is the expected one, apart from the seal: only the tag can tell."""
    codec = Sealed(KEYS)
    for key_id, outcome in ((bytes(8), NOT_OPENED), (KEYS.ids[0], CORRUPT)):
        value = value_of(codec, Chunk(1, SIZE, SLOT, seed=1), 0)
        value[SEAL_AT:HEADER_BYTES] = key_id.ljust(48, b"\0")
        value[HEADER_BYTES:] = bytes(len(value) - HEADER_BYTES)
        assert placed(codec, with_right_checksums(value), 0) is outcome


def test_a_sealed_stripe_with_the_header_of_another_place() -> None:
    codec, chunk = Sealed(KEYS), Chunk(1, SIZE, SLOT, seed=1)
    other_chunk = value_of(codec, Chunk(2, SIZE, SLOT, seed=2), 2)
    assert placed(codec, bytes(other_chunk), 2) is FOREIGN
    other_chunk[97:129] = chunk.frame.chunk_hash
    assert placed(codec, with_right_checksums(other_chunk), 2) is CORRUPT
    other_stripe = value_of(codec, chunk, 2)
    assert placed(codec, bytes(other_stripe), 1) is FOREIGN
    other_stripe[24] = 1
    other_stripe[40:48] = SLOT.to_bytes(8, "little")
    assert placed(codec, with_right_checksums(other_stripe), 1) is CORRUPT


def test_a_sealed_value_under_another_key() -> None:
    """Model, rank and prefix are in the key alone; a plain value would be taken."""
    for codec, outcome in ((Sealed(KEYS), CORRUPT), (Plain(), STORE_ID)):
        stripe = StripeIO.of(Chunk(1, SIZE, SLOT, seed=1).io(), 2)
        value = bytes(packed(codec, stripe._replace(key=b"theirs:" + stripe.key)))
        assert placed(codec, value, 2) == outcome


def test_any_metadata_leave_room_for_a_seal() -> None:
    codec = Sealed(KEYS)
    for groups, sizes in ((6, (2, 2, 4, 4)), (7, (2, 2, 4, 4)), (8, (64,)), (8, (8, 8))):
        nbytes = groups * 64
        formed = ([sizes] * groups, ["uint8"] * groups, MemoryFormat.BINARY)
        metadata = RemoteMetadata(nbytes, *formed).serialize()
        frame = ChunkFrame(FINGERPRINT, bytes(32), nbytes, nbytes, metadata)
        payload = os.urandom(nbytes)
        stripe = StripeIO(b"key", frame, 0, memoryview(bytearray(payload)))
        assert codec.place(stripe, bytes(packed(codec, stripe))) == STORE_ID
        assert stripe.payload == payload


def test_sealed_and_plain_readers_do_not_open_each_others() -> None:
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    for writer, reader in ((Plain(), Sealed(KEYS)), (Sealed(KEYS), Plain())):
        for index in STRIPES:
            assert placed(reader, bytes(value_of(writer, chunk, index)), index) is NOT_OPENED


LENGTHS: dict[str, tuple[Callable[[bytes], bytes], ReadOutcome]] = {
    "one byte short": (lambda value: value[:-1], CORRUPT),
    "header only": (lambda value: value[:HEADER_BYTES], CORRUPT),
    "half a header": (lambda value: value[:200], CORRUPT),
    "three bytes": (lambda value: value[:3], FOREIGN),
    "empty": (lambda value: b"", FOREIGN),
    "one byte long": (lambda value: value + b"x", CORRUPT),
    "with its tag behind it": (lambda value: value + value[624:640], CORRUPT),
    "twice": (lambda value: value * 2, CORRUPT),
    "a bit of its payload": (lambda value: value[:-1] + bytes([value[-1] ^ 1]), CORRUPT),
    "cut short behind its magic": (lambda value: value[:10], CORRUPT),
    "something else": (lambda value: b"y" * 100_000, FOREIGN),
    "something else, same length": (lambda value: b"y" * len(value), FOREIGN),
}


@pytest.mark.parametrize("codec", [Plain(), Sealed(KEYS)], ids=["plain", "sealed"])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_damaged_value_and_one_of_another_length(codec: Codec, case: str) -> None:
    change, outcome = LENGTHS[case]
    for index in STRIPES:
        value = bytes(value_of(codec, Chunk(1, SIZE, SLOT, seed=1), index))
        assert placed(codec, value, index) == STORE_ID
        assert placed(codec, change(value), index) is outcome


@pytest.mark.parametrize("codec", [Plain(), Sealed(KEYS)], ids=["plain", "sealed"])
def test_what_is_not_there_or_of_another_chunk(codec: Codec) -> None:
    for index in STRIPES:
        assert placed(codec, None, index) is ReadOutcome.INCOMPLETE
        other = bytes(value_of(codec, Chunk(2, SIZE, SLOT, seed=2), index))
        assert placed(codec, other, index) is FOREIGN
