# SPDX-License-Identifier: Apache-2.0
"""Sealed values: what a stranger with write access can do to them is a miss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    chunk_key,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy
from tests.servers import RedisServer
from tests.topologies import running_cluster

pytestmark = pytest.mark.usefixtures("both_ways")

SLOT = 4096
SIZE = 5 * SLOT - 100
OLD, NEW = b"\x01" * 32, b"\x02" * 32
KEYS = SealKeys([OLD])
LOADED, NOT_OPENED = ReadOutcome.LOADED, ReadOutcome.NOT_OPENED
CORRUPT, FOREIGN = ReadOutcome.CORRUPT, ReadOutcome.FOREIGN


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def plane(server: RedisServer) -> Iterator[RedisPlane]:
    with running(server.url, seal_keys=KEYS) as plane:
        yield plane


@pytest.fixture
def stored(plane: RedisPlane) -> Chunk:
    chunk = Chunk(1, SIZE, SLOT, seed=1)
    # A neighbour, to see that nothing else is touched.
    assert set(write(plane, chunk, Chunk(2, SIZE, SLOT, seed=2))) == {WriteOutcome.STORED}
    return chunk


def check(plane: RedisPlane, client: redis.Redis, stored: Chunk, outcome: ReadOutcome) -> None:
    """What reading the spoiled chunk gives, what is left of it, and that others still load."""
    present = client.exists(*stored.stripe_keys())
    assert read(plane, Chunk(1, SIZE, SLOT)) == [outcome]
    neighbour = Chunk(2, SIZE, SLOT)
    assert read(plane, neighbour) == [LOADED]
    assert neighbour.content == Chunk(2, SIZE, SLOT, seed=2).content
    assert client.exists(*stored.stripe_keys()) == present, "a reader has deleted something"
    # The same chunk can be stored and loaded again.
    assert write(plane, stored) == [WriteOutcome.STORED]
    assert read(plane, Chunk(1, SIZE, SLOT)) == [LOADED]


def forge(
    client: redis.Redis, key: bytes, change: Callable[[bytearray], None], source: bytes = b""
) -> None:
    """Change a value and make its checksums right, as anyone can."""
    value = bytearray(client.get(source or key))
    change(value)
    value[56:64] = xxh3_64_intdigest(value[HEADER_BYTES:]).to_bytes(8, "little")
    value[168:176] = bytes(8)
    value[168:176] = xxh3_64_intdigest(value[:HEADER_BYTES]).to_bytes(8, "little")
    client.set(key, bytes(value))


def flip(at: int) -> Callable[[bytearray], None]:
    def change(value: bytearray) -> None:
        value[at] ^= 0x10

    return change


# ------------------------------------------------------------------- in order


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("size", "slot"),
    [(1, 64), (240, 240), (241, 241), (64 * 64, 64), (SIZE, SLOT), (9 << 20, 1 << 20)],
)
def test_stored_and_loaded(
    server: RedisServer, client: redis.Redis, size: int, slot: int, threads: int
) -> None:
    chunks = [Chunk(number, size, slot, seed=number) for number in range(5)]
    before = [chunk.content for chunk in chunks]
    settings = {"network_threads": threads, "connections": 2}
    with running(server.url, seal_keys=KEYS, **settings) as plane:
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        assert [chunk.content for chunk in chunks] == before, "the slots stay as they are"
        loaded = [Chunk(number, size, slot) for number in range(5)]
        assert set(read(plane, *loaded)) == {LOADED}
    assert [chunk.content for chunk in loaded] == before
    for chunk in chunks:
        for index, key in enumerate(chunk.stripe_keys()):
            value = client.get(key)
            header = describe_header(value)
            assert header.sealed_with == KEYS.ids[0]
            assert header.checksum == xxh3_64_intdigest(value[HEADER_BYTES:])
            assert len(value) == HEADER_BYTES + len(chunk.slots[index])
            assert size < 64 or value[HEADER_BYTES:] != chunk.slots[index]
        # Not even a piece of it can be found.
        whole = b"".join(client.get(key) for key in chunk.stripe_keys())
        assert size < 64 or chunk.content[:16] not in whole


def test_no_nonce_is_used_twice(plane: RedisPlane, client: redis.Redis) -> None:
    nonces = []
    for _ in range(2):
        chunks = [Chunk(number, SLOT, SLOT, seed=1) for number in range(50)]
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        values = client.mget([key for chunk in chunks for key in chunk.stripe_keys()])
        nonces += [value[SEAL_AT + 8 : SEAL_AT + 32] for value in values]
    assert len({*nonces}) == len(nonces) == 100


# ----------------------------------------------------------------------- keys


def test_a_wrong_key(server: RedisServer, client: redis.Redis, stored: Chunk) -> None:
    with running(server.url, seal_keys=SealKeys([NEW])) as other:
        assert read(other, Chunk(1, SIZE, SLOT)) == [NOT_OPENED]
        assert client.exists(*stored.stripe_keys()) == stored.stripe_count
        assert other.stats().reads[NOT_OPENED] == 1
        assert write(other, stored) == [WriteOutcome.STORED]
        assert read(other, Chunk(1, SIZE, SLOT)) == [LOADED]


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


def test_a_plain_value_is_a_miss(
    server: RedisServer, plane: RedisPlane, client: redis.Redis, stored: Chunk
) -> None:
    """Anyone with write access could have made it."""
    forged = Chunk(1, SIZE, SLOT, seed=666)
    with running(server.url) as plain:
        assert write(plain, forged) == [WriteOutcome.STORED]
        assert read(plain, Chunk(1, SIZE, SLOT)) == [LOADED]
    check(plane, client, stored, NOT_OPENED)


@pytest.mark.parametrize("stripe", [0, 4])
def test_one_plain_stripe_among_sealed_ones(
    server: RedisServer, plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    key = stored.stripe_keys()[stripe]
    header = client.get(key)[:HEADER_BYTES]
    value = bytearray(header + bytes(len(stored.slots[stripe])))

    def plain(value: bytearray) -> None:
        value[28] = 0
        value[SEAL_AT:HEADER_BYTES] = bytes(48)

    client.set(key, bytes(value))
    forge(client, key, plain)
    assert stored.frame.check_header(client.get(key), stripe).ok
    check(plane, client, stored, NOT_OPENED)


# ------------------------------------------------------------------- forgeries

# The header's fields, and what a reader makes of another value with right checksums.
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


@pytest.mark.parametrize("stripe", [0, 4])
@pytest.mark.parametrize("field", FIELDS)
def test_another_value_of_a_field(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int, field: str
) -> None:
    at, outcome = FIELDS[field]
    forge(client, stored.stripe_keys()[stripe], flip(at))
    check(plane, client, stored, outcome)


@pytest.mark.parametrize("at", [SEAL_AT, SEAL_AT + 40, 160, 170])
def test_a_flipped_bit_in_the_header(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, at: int
) -> None:
    key = stored.stripe_keys()[3]
    value = bytearray(client.get(key))
    value[at] ^= 1
    client.set(key, bytes(value))
    check(plane, client, stored, CORRUPT)


@pytest.mark.parametrize("key_id", [bytes(8), KEYS.ids[0]])
def test_a_seal_that_nobody_made(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, key_id: bytes
) -> None:
    """The header is the expected one but for the seal: only the tag can tell."""

    def forged(value: bytearray) -> None:
        value[SEAL_AT:HEADER_BYTES] = key_id.ljust(48, b"\0")
        value[HEADER_BYTES:] = bytes(len(value) - HEADER_BYTES)

    forge(client, stored.stripe_keys()[0], forged)
    check(plane, client, stored, CORRUPT if any(key_id) else NOT_OPENED)


@pytest.mark.parametrize("stripe", [0, 2])
def test_a_stripe_of_another_chunk(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    """As it is, and with a header that names this chunk."""
    key, source = stored.stripe_keys()[stripe], Chunk(2, SIZE, SLOT).stripe_keys()[stripe]
    client.set(key, client.get(source))
    check(plane, client, stored, FOREIGN)

    def renamed(value: bytearray) -> None:
        value[97:129] = stored.frame.chunk_hash

    forge(client, key, renamed, source)
    check(plane, client, stored, CORRUPT)


def test_another_stripe_of_the_chunk(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    keys = stored.stripe_keys()
    client.set(keys[1], client.get(keys[2]))
    check(plane, client, stored, FOREIGN)

    def moved(value: bytearray) -> None:
        value[24] = 1
        value[40:48] = SLOT.to_bytes(8, "little")

    forge(client, keys[1], moved, keys[2])
    check(plane, client, stored, CORRUPT)


@pytest.mark.parametrize(
    ("model", "rank", "prefix"),
    [("test/other", 0, b""), ("test/model", 1, b""), ("test/model", 0, b"theirs:")],
)
def test_the_same_bytes_under_another_key(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, model: str, rank: int, prefix: bytes
) -> None:
    """Model, rank and prefix are in the key alone; a plain value would be taken."""
    stem = key_stem(NAMESPACE, model, rank, 32, prefix)
    other = Chunk(1, SIZE, SLOT)
    other.key = stem + hash_tag(stored.frame.chunk_hash)
    for key, moved in zip(stored.stripe_keys(), other.stripe_keys(), strict=True):
        client.copy(key, moved)
    assert read(plane, other) == [CORRUPT]
    assert read(plane, Chunk(1, SIZE, SLOT)) == [LOADED]


@pytest.mark.parametrize("stripe", [1, 4])
def test_stripes_of_two_stores(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int
) -> None:
    key = stored.stripe_keys()[stripe]
    older = client.get(key)
    assert write(plane, stored) == [WriteOutcome.STORED]
    client.set(key, older)
    check(plane, client, stored, ReadOutcome.TORN)


LENGTHS: dict[str, tuple[Callable[[bytes], bytes], ReadOutcome]] = {
    "one byte short": (lambda value: value[:-1], CORRUPT),
    "header only": (lambda value: value[:HEADER_BYTES], CORRUPT),
    "half a header": (lambda value: value[:200], CORRUPT),
    "empty": (lambda value: b"", FOREIGN),
    "one byte long": (lambda value: value + b"x", CORRUPT),
    "with its tag behind it": (lambda value: value + value[496:512], CORRUPT),
}


@pytest.mark.parametrize("stripe", [0, 4])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_value_of_another_length(
    plane: RedisPlane, client: redis.Redis, stored: Chunk, stripe: int, case: str
) -> None:
    change, outcome = LENGTHS[case]
    key = stored.stripe_keys()[stripe]
    client.set(key, change(client.get(key)))
    check(plane, client, stored, outcome)


# ----------------------------------------------------------------------- other


def chunk_of_groups(count: int, sizes: tuple[int, ...]) -> Chunk:
    chunk = Chunk(1, count * 64, 64, seed=1)
    metadata = RemoteMetadata(count * 64, [sizes] * count, ["uint8"] * count, MemoryFormat.BINARY)
    fingerprint, chunk_hash = chunk.frame.fingerprint, chunk.frame.chunk_hash
    chunk.frame = ChunkFrame(fingerprint, chunk_hash, count * 64, 64, metadata.serialize())
    return chunk


@pytest.mark.parametrize(
    ("groups", "sizes"), [(6, (2, 2, 4, 4)), (7, (2, 2, 4, 4)), (8, (64,)), (8, (8, 8))]
)
def test_any_metadata_leave_room_for_a_seal(
    plane: RedisPlane, client: redis.Redis, groups: int, sizes: tuple[int, ...]
) -> None:
    chunk, good = chunk_of_groups(groups, sizes), Chunk(2, SIZE, SLOT, seed=2)
    assert write(plane, chunk, good) == [WriteOutcome.STORED] * 2
    assert read(plane, chunk, Chunk(2, SIZE, SLOT)) == [LOADED] * 2


@pytest.mark.servers
def test_the_shards_of_a_cluster(tmp_path: Path) -> None:
    chunks = [Chunk(number, SIZE, SLOT, seed=number) for number in range(20)]
    with running_cluster(tmp_path) as cluster, running(cluster.url, seal_keys=KEYS) as plane:
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        loaded = [Chunk(number, SIZE, SLOT) for number in range(20)]
        assert set(read(plane, *loaded)) == {LOADED}
        assert [chunk.content for chunk in loaded] == [chunk.content for chunk in chunks]


def test_killed_in_the_middle_of_stores(own_server: RedisServer) -> None:
    chunks = [Chunk(number, SIZE, SLOT, seed=number) for number in range(10)]
    with Proxy(own_server.port) as proxy, running(proxy.url, seal_keys=KEYS) as plane:
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        own_server.command("FLUSHALL")
        proxy.acknowledge.clear()
        proxy.stripes_set.clear()
        answers = Answers()
        for chunk in chunks:
            plane.store_all((chunk.io(),), answers)
        wait_until(lambda: len(proxy.stripes_set) >= 3)
        own_server.kill()
        proxy.acknowledge.set()
        assert WriteOutcome.STORED not in answers.wait(10)
        own_server.start()
        wait_until(lambda: plane.state.up)
        assert scan(plane, [chunk_key(n) for n in range(10)]).prefix_length == 0
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        loaded = [Chunk(number, SIZE, SLOT) for number in range(10)]
        assert set(read(plane, *loaded)) == {LOADED}
        assert [chunk.content for chunk in loaded] == [chunk.content for chunk in chunks]


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
