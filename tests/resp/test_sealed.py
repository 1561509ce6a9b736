# SPDX-License-Identifier: Apache-2.0
"""Sealed values: what a stranger with write access can do to them is a miss."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, describe_header
from lmcache_redis.resp import RedisPlane
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import Answers, Chunk, check_loads, check_moves, check_stores, read, running
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


SIZES = [(1, 64), (240, 240), (241, 241), (64 * 64, 64), (SIZE, SLOT), (3 << 20, 1 << 20)]


@BOTH_WAYS
def test_stored_and_loaded(server: RedisServer, client: redis.Redis) -> None:
    """By two threads each, which have memory of their own to seal in."""
    with running(server.url, seal_keys=KEYS, network_threads=2, connections=2) as plane:
        for size, slot in SIZES:
            chunks = [Chunk(number, size, slot, seed=number) for number in range(5)]
            before = [chunk.content for chunk in chunks]
            check_moves(plane, *chunks)
            assert [chunk.content for chunk in chunks] == before, "the slots stay as they are"
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


@BOTH_WAYS
def test_who_has_the_key_opens_it(server: RedisServer, client: redis.Redis, stored: Chunk) -> None:
    for keys, outcome in (
        ([OLD, NEW], LOADED),
        ([NEW, OLD], LOADED),
        ([NEW], NOT_OPENED),
        (None, NOT_OPENED),
    ):
        with running(server.url, seal_keys=keys and SealKeys(keys)) as reader:
            loaded = stored.empty()
            assert read(reader, loaded) == [outcome]
            assert outcome is NOT_OPENED or loaded.content == stored.content
            assert reader.stats().reads[outcome] == 1
            assert client.exists(*stored.stripe_keys()) == stored.stripe_count
    with running(server.url, seal_keys=SealKeys([NEW, OLD])) as rotated:
        check_stores(rotated, stored)
    for keys, outcome in (([NEW], LOADED), ([OLD], NOT_OPENED)):
        with running(server.url, seal_keys=SealKeys(keys)) as reader:
            assert read(reader, stored.empty()) == [outcome]


# Of which stripe, what is changed, and whether the checksums are made right. More: `test_codecs`.
FORGERIES = {
    "a field that readers check": (0, flip(100), True, FOREIGN),
    "a field that the tag alone covers": (4, flip(10), True, CORRUPT),
    "key id": (4, flip(SEAL_AT), True, NOT_OPENED),
    "nonce": (0, flip(SEAL_AT + 8), True, CORRUPT),
    "payload": (4, flip(HEADER_BYTES + 2000), True, CORRUPT),
    "a damaged payload": (0, flip(-1), False, CORRUPT),
    "one byte short": (0, lambda value: value.pop(), False, CORRUPT),
}


@BOTH_WAYS
def test_what_is_changed_is_a_miss(plane: RedisPlane, client: redis.Redis, stored: Chunk) -> None:
    for what, (stripe, change, has_right_checksums, outcome) in FORGERIES.items():
        value = spoil(client, stored, stripe, change)
        if has_right_checksums:
            client.set(stored.stripe_keys()[stripe], with_right_checksums(value))
        check(plane, client, stored, outcome, what)


@BOTH_WAYS
def test_a_server_that_stalls_while_stripes_are_sent(own_server: RedisServer) -> None:
    """What was sent in part stays as it is."""
    size = 8 << 20
    chunks = [Chunk(number, size, size, seed=number) for number in range(8)]
    with running(own_server.url, seal_keys=KEYS, connections=1) as plane:
        check_stores(plane, chunks[0])
        own_server.stop()
        answers = Answers()
        for chunk in chunks:
            plane.store_all((chunk.io(),), answers)
        time.sleep(0.3)
        own_server.cont()
        assert set(answers.wait(len(chunks))) == {WriteOutcome.STORED}
        check_loads(plane, *chunks)


@BOTH_WAYS
def test_a_load_that_is_cancelled_leaves_its_slots_alone(plane: RedisPlane, stored: Chunk) -> None:
    for _ in range(50):
        chunk, answers = stored.empty(), Answers()
        io = chunk.io()
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
