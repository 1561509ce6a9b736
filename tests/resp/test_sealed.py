# SPDX-License-Identifier: Apache-2.0
"""Sealed values: what a stranger with write access can do to them is a miss."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, ChunkFrame, describe_header
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem
from lmcache_redis.resp import RedisPlane
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ChunkIO, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    NAMESPACE,
    PATIENCE_S,
    Answers,
    Chunk,
    read,
    running,
    write,
)
from tests.resp.test_codecs import flip, with_right_checksums
from tests.resp.test_corruption import SIZE, SLOT, check, spoil
from tests.resp.test_corruption import stored as stored
from tests.servers import RedisServer

pytestmark = pytest.mark.servers
BOTH_WAYS = pytest.mark.usefixtures("both_ways")

OLD, NEW = b"\x01" * 32, b"\x02" * 32
KEYS = SealKeys([OLD])
LOADED, NOT_OPENED = ReadOutcome.LOADED, ReadOutcome.NOT_OPENED
CORRUPT, FOREIGN = ReadOutcome.CORRUPT, ReadOutcome.FOREIGN


@pytest.fixture
def plane(server: RedisServer) -> Iterator[RedisPlane]:
    with running(server.url, seal_keys=KEYS) as plane:
        yield plane


# ------------------------------------------------------------------- in order


SIZES = [(1, 64), (240, 240), (241, 241), (64 * 64, 64), (SIZE, SLOT), (3 << 20, 1 << 20)]


@BOTH_WAYS
@pytest.mark.parametrize("threads", [1, 2])
def test_stored_and_loaded(server: RedisServer, client: redis.Redis, threads: int) -> None:
    settings = {"network_threads": threads, "connections": 2}
    with running(server.url, seal_keys=KEYS, **settings) as plane:
        for size, slot in SIZES:
            chunks = [Chunk(number, size, slot, seed=number) for number in range(5)]
            before = [chunk.content for chunk in chunks]
            assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
            assert [chunk.content for chunk in chunks] == before, "the slots stay as they are"
            loaded = [Chunk(number, size, slot) for number in range(5)]
            assert set(read(plane, *loaded)) == {LOADED}
            assert [chunk.content for chunk in loaded] == before
            for chunk in chunks:
                check_sealed(client, chunk)


def check_sealed(client: redis.Redis, chunk: Chunk) -> None:
    values = [client.get(key) for key in chunk.stripe_keys()]
    for value, payload in zip(values, chunk.slots, strict=True):
        header = describe_header(value)
        assert header.sealed_with == KEYS.ids[0]
        assert header.checksum == xxh3_64_intdigest(value[HEADER_BYTES:])
        assert len(value) == HEADER_BYTES + len(payload)
    # Not even a piece of it can be found.
    assert len(chunk.content) < 64 or chunk.content[:16] not in b"".join(values)


# ----------------------------------------------------------------------- keys


def test_a_wrong_key(server: RedisServer, client: redis.Redis, stored: Chunk) -> None:
    with running(server.url, seal_keys=SealKeys([NEW])) as other:
        assert read(other, Chunk(1, SIZE, SLOT)) == [NOT_OPENED]
        assert client.exists(*stored.stripe_keys()) == stored.stripe_count
        assert other.stats().reads[NOT_OPENED] == 1
        assert write(other, stored) == [WriteOutcome.STORED]
        assert read(other, Chunk(1, SIZE, SLOT)) == [LOADED]


@BOTH_WAYS
def test_no_key(server: RedisServer, client: redis.Redis, stored: Chunk) -> None:
    with running(server.url) as plain:
        assert read(plain, Chunk(1, SIZE, SLOT)) == [NOT_OPENED]
        assert client.exists(*stored.stripe_keys()) == stored.stripe_count


def test_a_key_is_rotated(server: RedisServer, stored: Chunk) -> None:
    readers = [SealKeys([OLD, NEW]), SealKeys([NEW, OLD])]
    for keys in readers:
        with running(server.url, seal_keys=keys) as plane:
            assert read(plane, loaded := Chunk(1, SIZE, SLOT)) == [LOADED]
            assert loaded.content == stored.content
    with running(server.url, seal_keys=readers[1]) as plane:
        assert write(plane, Chunk(3, SIZE, SLOT, seed=3)) == [WriteOutcome.STORED]
    for keys, outcome in ((SealKeys([NEW]), LOADED), (KEYS, NOT_OPENED)):
        with running(server.url, seal_keys=keys) as plane:
            assert read(plane, Chunk(3, SIZE, SLOT)) == [outcome]


@BOTH_WAYS
def test_a_plain_value_is_a_miss(
    server: RedisServer, plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    """Anyone with write access could have made it."""
    forged = Chunk(1, SIZE, SLOT, seed=666)
    with running(server.url) as plain:
        assert write(plain, forged) == [WriteOutcome.STORED]
        assert read(plain, Chunk(1, SIZE, SLOT)) == [LOADED]
    check(plane, client, stored, NOT_OPENED)


# ------------------------------------------------------------------- forgeries

# Of which stripe, what is changed, and whether the checksums are made right. More: `test_codecs`.
FORGERIES = {
    "a field that readers check": (0, flip(100), True, FOREIGN),
    "a field that the tag alone covers": (4, flip(10), True, CORRUPT),
    "key id": (4, flip(SEAL_AT), True, NOT_OPENED),
    "nonce": (0, flip(SEAL_AT + 8), True, CORRUPT),
    "tag": (4, flip(HEADER_BYTES - 1), True, CORRUPT),
    "payload": (4, flip(HEADER_BYTES + 2000), True, CORRUPT),
    "a damaged header": (3, flip(160), False, CORRUPT),
    "a damaged payload": (0, flip(-1), False, CORRUPT),
    "one byte short": (0, lambda value: value.pop(), False, CORRUPT),
    "one byte long": (4, lambda value: value.append(1), False, CORRUPT),
    "half a header": (4, lambda value: value.__delitem__(slice(200, None)), False, CORRUPT),
    "empty": (0, bytearray.clear, False, FOREIGN),
}


@BOTH_WAYS
def test_what_is_changed_is_a_miss(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for what, (stripe, change, has_right_checksums, outcome) in FORGERIES.items():
        value = spoil(client, stored, stripe, change)
        if has_right_checksums:
            client.set(stored.stripe_keys()[stripe], with_right_checksums(value))
        check(plane, client, stored, outcome, what)


@BOTH_WAYS
def test_the_same_bytes_under_another_key(
    plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    """Model, rank and prefix are in the key alone; a plain value would be taken."""
    for model, rank, prefix in (
        ("test/other", 0, b""),
        ("test/model", 1, b""),
        ("test/model", 0, b"theirs:"),
    ):
        other = Chunk(1, SIZE, SLOT)
        stem = key_stem(NAMESPACE, model, rank, 32, prefix)
        other.key = stem + hash_tag(stored.frame.chunk_hash)
        for key, moved in zip(stored.stripe_keys(), other.stripe_keys(), strict=True):
            client.copy(key, moved)
        assert read(plane, other) == [CORRUPT]
    assert read(plane, Chunk(1, SIZE, SLOT)) == [LOADED]


@BOTH_WAYS
def test_stripes_of_two_stores(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    key = stored.stripe_keys()[4]
    older = client.get(key)
    assert write(plane, stored) == [WriteOutcome.STORED]
    client.set(key, older)
    check(plane, client, stored, ReadOutcome.TORN)


# ----------------------------------------------------------------------- other


def chunk_of_groups(count: int, sizes: tuple[int, ...]) -> Chunk:
    chunk = Chunk(1, count * 64, 64, seed=1)
    metadata = RemoteMetadata(count * 64, [sizes] * count, ["uint8"] * count, MemoryFormat.BINARY)
    fingerprint, chunk_hash = chunk.frame.fingerprint, chunk.frame.chunk_hash
    chunk.frame = ChunkFrame(fingerprint, chunk_hash, count * 64, 64, metadata.serialize())
    return chunk


def test_any_metadata_leave_room_for_a_seal(plane: RedisPlane) -> None:
    for groups, sizes in ((6, (2, 2, 4, 4)), (7, (2, 2, 4, 4)), (8, (64,)), (8, (8, 8))):
        chunk = chunk_of_groups(groups, sizes)
        assert write(plane, chunk) == [WriteOutcome.STORED]
        assert read(plane, chunk) == [LOADED]


@BOTH_WAYS
def test_a_server_that_stalls_while_stripes_are_sent(own_server: RedisServer) -> None:
    """What was sent in part stays as it is."""
    size = 8 << 20
    chunks = [Chunk(number, size, size, seed=number) for number in range(8)]
    with running(own_server.url, seal_keys=SealKeys([OLD]), connections=1) as plane:
        assert write(plane, chunks[0]) == [WriteOutcome.STORED]
        own_server.stop()
        answers = Answers()
        for chunk in chunks:
            plane.store_all((chunk.io(),), answers)
        time.sleep(0.3)
        own_server.cont()
        assert set(answers.wait(len(chunks))) == {WriteOutcome.STORED}
        loaded = [Chunk(number, size, size) for number in range(8)]
        assert set(read(plane, *loaded)) == {LOADED}
        assert all(a.content == b.content for a, b in zip(loaded, chunks, strict=True))


@BOTH_WAYS
def test_a_load_that_is_cancelled_leaves_its_slots_alone(plane: RedisPlane, stored: Chunk) -> None:
    for _ in range(50):
        chunk, answers = Chunk(1, SIZE, SLOT), Answers()
        io: ChunkIO = chunk.io(PATIENCE_S)
        plane.load_all((io,), answers)
        plane.cancel(io)
        (outcome,) = answers.wait(1)
        after = chunk.content
        assert outcome in (LOADED, ReadOutcome.CANCELLED)
        assert read(plane, Chunk(2, SIZE, SLOT)) == [LOADED]
        assert chunk.content == after
        chunk.check_guards()


def test_the_keys_are_named_in_the_log(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = SealKeys([NEW, OLD])
    with caplog.at_level("INFO"), running(server.url, seal_keys=keys):
        pass
    (line,) = [record.getMessage() for record in caplog.records if "sealed" in record.getMessage()]
    assert all(key_id.hex() in line for key_id in keys.ids)
    assert OLD.hex()[:8] not in line
