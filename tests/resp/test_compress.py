# SPDX-License-Identifier: Apache-2.0
"""Numbers in fewer bytes, against a real server: written by some, read by all, sealed or not."""

from __future__ import annotations

import functools

import pytest
import redis
import torch
from xxhash import xxh3_64_intdigest

from lmcache_redis import native
from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    add_checksums,
    describe_header,
    mark_packed,
    plain_checksum,
)
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.resp.codecs import Plain, Sealed, StripeIO, codec_of, elements_of, pack
from lmcache_redis.resp.jobs import StripeTask
from lmcache_redis.resp.lanes import BulkWorker
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.fuzz.packed import elements_with
from tests.resp.helpers import (
    LEAST_CONNECTIONS,
    Answers,
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    open_streams,
    read,
    running,
    wait_until,
    write,
)
from tests.servers import RedisServer

BOTH_WAYS = pytest.mark.usefixtures("both_ways")

SLOT = 100_000
SIZE = 5 * SLOT - 1001
KEYS = SealKeys([bytes(32)])
SEALED = pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "sealed"])


@functools.cache
def packable(nbytes: int, index: int, spread: int) -> bytes:
    return elements_with([112 + (n * n + index) % spread for n in range(nbytes // 2)], 2)


def numbers(number: int, spread: int = 7) -> Chunk:
    """A chunk of bf16 numbers in so wide a range."""
    chunk = Chunk(number, SIZE, SLOT, seed=number)
    for index, slot in enumerate(chunk.slots):
        made = packable(len(slot), index, spread)
        slot[: len(made)] = made
    return chunk


def empty(number: int) -> Chunk:
    return Chunk(number, SIZE, SLOT)


@BOTH_WAYS
@SEALED
def test_all_read_what_some_pack(
    server: RedisServer, client: redis.Redis, keys: SealKeys | None
) -> None:
    chunks = [numbers(1), numbers(2, 40), Chunk(3, SIZE, SLOT, seed=3)]
    with (
        running(server.url, seal_keys=keys, compress="lossless") as packing,
        running(server.url, seal_keys=keys) as plain,
    ):
        for writer in (packing, plain):
            written, answers = [chunk.io() for chunk in chunks], Answers()
            writer.store_all(written, answers)
            assert answers.of(written) == [WriteOutcome.STORED] * 3
            sizes = [sum(client.strlen(k) for k in c.stripe_keys()) for c in chunks]
            stored = [size - HEADER_BYTES * chunks[0].stripe_count for size in sizes]
            assert [each.stored_bytes for each in written] == stored
            if writer is packing:
                assert stored[0] < SIZE / 1.3
                assert stored[0] < stored[1] < SIZE * 31 / 32
                assert stored[2] == SIZE, "noise stays as it is"
            else:
                assert stored == [SIZE] * 3
            for reader in (packing, plain):
                check_loads(reader, *chunks)
        header = describe_header(client.get(chunks[0].stripe_keys()[0]))
        assert (header.stored_bytes, header.element_bytes) == (header.payload_bytes, 0)


def test_nothing_is_packed_without_the_native_extension(
    server: RedisServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was packed is read."""
    with running(server.url, compress="lossless") as packing:
        check_stores(packing, numbers(1))
    assert "packed" not in caplog.text
    monkeypatch.setattr(native, "packing", None)
    with running(server.url, compress="lossless") as plane:
        assert "not packed" in caplog.text
        check_stores(plane, numbers(2))
        stored = [sum(map(client.strlen, numbers(n).stripe_keys())) for n in (1, 2)]
        assert stored[0] < SIZE < stored[1]
        check_loads(plane, numbers(1), numbers(2))


@pytest.mark.parametrize("compress", ["lossless", "off"])
def test_no_more_are_packed_than_lanes_wait_for(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    begin_next, taken, surplus = BulkWorker._begin_next, [0], [0]

    def counted(worker: BulkWorker) -> list[StripeTask]:
        begun = begin_next(worker)
        if not worker._transfers.is_load:
            taken.append(len(begun))
            surplus.append(len(begun) - max(1, len(worker._idle)))
        return begun

    monkeypatch.setattr(BulkWorker, "_begin_next", counted)
    with running(server.url, connections=3, compress=compress) as plane:
        assert write(plane, *map(numbers, range(8))) == [WriteOutcome.STORED] * 8
    assert sum(taken) >= 8 * numbers(1).stripe_count
    assert (max(surplus) > 0) == (compress == "off")


@BOTH_WAYS
@SEALED
def test_damage_is_a_miss(server: RedisServer, client: redis.Redis, keys: SealKeys | None) -> None:
    chunk = numbers(1)
    key = chunk.stripe_keys()[2]
    with running(server.url, seal_keys=keys, compress="lossless") as plane:
        for at in (HEADER_BYTES, HEADER_BYTES + 40_000, -1, 177, 184, 300):
            check_stores(plane, chunk)
            value = bytearray(client.get(key))
            value[at] ^= 1
            client.set(key, bytes(value))
            assert read(plane, empty(1)) == [ReadOutcome.CORRUPT], at
        check_moves(plane, chunk)


@SEALED
def test_a_packed_value_names_the_payload_that_was_packed(keys: SealKeys | None) -> None:
    """Not of a sealed one: its tag is a better checksum, and tells nothing of what it hides."""
    for chunk, is_packed in ((numbers(1), True), (Chunk(2, SIZE, SLOT, seed=2), False)):
        stripe = StripeIO.of(chunk.io(), 1)
        header, _ = codec_of(keys, True).pack(stripe, b"s" * 16, 1)
        is_given = keys is None and is_packed
        assert plain_checksum(header) == (xxh3_64_intdigest(stripe.payload) if is_given else 0)


def test_other_numbers_than_were_packed_are_a_miss() -> None:
    """Unless another writer has given no checksum. Of movers: `test_packed`."""
    one, other = (StripeIO.of(numbers(1).io(), index) for index in (1, 2))
    codec, room = Plain(True), memoryview(bytearray(SLOT))
    header, _ = codec.pack(one, b"s" * 16, 1)
    _, used = pack(other.payload, (2,), room)
    for checksum, found in ((plain_checksum(header), ReadOutcome.CORRUPT), (0, b"s" * 16)):
        mark_packed(header, 2, used, checksum)
        add_checksums(header, xxh3_64_intdigest(room[:used]))
        value = bytes(header) + bytes(room[:used])
        assert codec.place(StripeIO.of(empty(1).io(), 1), value) == found


def test_a_sealed_reader_checks_what_it_unpacks() -> None:
    """A writer that gives the checksum, and a wrong one."""
    chunk, codec = numbers(1), codec_of(KEYS, True)
    stripe = StripeIO.of(chunk.io(), 1)
    for checksum in (0, xxh3_64_intdigest(stripe.payload), 1):
        header = stripe.header(b"s" * 16, 1, True)
        room = memoryview(bytearray(len(stripe.payload)))
        element_bytes, used = pack(stripe.payload, (2,), room)
        mark_packed(header, element_bytes, used, checksum)
        sealed = KEYS.seal(stripe.key, header, room[:used], memoryview(bytearray(used)))
        add_checksums(header, xxh3_64_intdigest(sealed))
        into = StripeIO.of(empty(1).io(), 1)
        found = codec.place(into, bytes(header) + bytes(sealed))
        assert found == (ReadOutcome.CORRUPT if checksum == 1 else b"s" * 16)
        assert checksum == 1 or into.payload == stripe.payload


@BOTH_WAYS
def test_a_sealed_value_is_not_read_without_its_key(server: RedisServer) -> None:
    """Nor the reverse, and it costs no connection."""

    def cannot_open(plane: RedisPlane) -> None:
        assert read(plane, empty(1)) == [ReadOutcome.NOT_OPENED]
        wait_until(lambda: open_streams(plane) == LEAST_CONNECTIONS)
        connects = plane.stats().connects
        for _ in range(3):
            assert read(plane, empty(1)) == [ReadOutcome.NOT_OPENED]
        assert plane.stats().connects == connects

    with running(server.url, seal_keys=KEYS, connections=1, compress="lossless") as sealed:
        assert write(sealed, numbers(1)) == [WriteOutcome.STORED]
        with running(server.url, connections=1) as plain:
            cannot_open(plain)
            assert write(plain, numbers(1)) == [WriteOutcome.STORED]
            cannot_open(sealed)
        with running(server.url, compress="lossless") as packing:
            assert write(packing, numbers(1)) == [WriteOutcome.STORED]
        cannot_open(sealed)


@SEALED
def test_a_value_that_was_received_apart(keys: SealKeys | None) -> None:
    """As after a redirection."""
    chunk, codec = numbers(1), codec_of(keys, True)
    stripe = StripeIO.of(chunk.io(), 1)
    header, stored = codec.pack(stripe, b"s" * 16, 1)
    add_checksums(header, xxh3_64_intdigest(stored))
    value = bytes(header) + bytes(stored)
    assert len(value) < len(stripe.payload)
    into = StripeIO.of(empty(1).io(), 1)
    reader = codec_of(keys)
    assert reader.place(into, value) == b"s" * 16
    assert into.payload == stripe.payload
    assert reader.place(into, value[:-1]) is ReadOutcome.CORRUPT
    assert reader.place(into, value[:-1] + bytes((value[-1] ^ 1,))) is ReadOutcome.CORRUPT
    assert reader.place(into, None) is ReadOutcome.INCOMPLETE


@pytest.mark.parametrize(
    ("dtypes", "fmt", "sizes"),
    [
        (["bfloat16"], MemoryFormat.PAGES, (2,)),
        (["float16", "bfloat16"], MemoryFormat.KV_2LTD, (2,)),
        (["float32"], MemoryFormat.PAGES, (4,)),
        (["float8_e4m3fn"], MemoryFormat.PAGES, (1,)),
        (["uint8"], MemoryFormat.PAGES, (1, 2)),
        (["uint8", "bfloat16"], MemoryFormat.PAGES, (2,)),
        (["int8"], MemoryFormat.PAGES, ()),
        (["float64"], MemoryFormat.PAGES, ()),
        (["bfloat16", "float32"], MemoryFormat.PAGES, ()),
        (["uint8", "int8"], MemoryFormat.PAGES, ()),
        (["bfloat16"], MemoryFormat.BINARY, ()),
        ([], MemoryFormat.BINARY_BUFFER, ()),
    ],
)
def test_what_is_tried(dtypes: list[str], fmt: MemoryFormat, sizes: tuple[int, ...]) -> None:
    metadata = RemoteMetadata(64, [()] * len(dtypes), dtypes, fmt)
    assert elements_of(metadata.serialize()) == sizes


@pytest.mark.unit
@pytest.mark.parametrize(
    ("dtype", "nbytes", "most"),
    [
        (torch.float8_e4m3fn, 1, 0.93),
        (torch.float8_e5m2, 1, 0.81),
        (torch.bfloat16, 2, 0.74),
        (torch.float16, 2, 0.92),
    ],
)
def test_pages_of_bytes_are_packed_as_what_they_are(
    dtype: torch.dtype, nbytes: int, most: float
) -> None:
    """vLLM's pages of fp8 are tensors of bytes."""
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    payload = values.to(dtype).view(torch.uint8).numpy().tobytes()
    element_bytes, used = pack(payload, (1, 2), memoryview(bytearray(len(payload))))
    assert element_bytes == nbytes
    assert used < most * len(payload)
    noise = Chunk(1, SLOT, SLOT, seed=1).content
    assert pack(noise, (1, 2), memoryview(bytearray(len(noise)))) == (0, 0)


def test_what_is_off_takes_no_memory_and_no_turns() -> None:
    assert Plain().together > 4 == Plain(True).together == Sealed(KEYS).together
    with pytest.raises(ConfigError, match="choose one of off, lossless"):
        RedisOptions("redis://h", compress="zstd")
