# SPDX-License-Identifier: Apache-2.0
"""Which chunks are found, what their stripes are, and that looking changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.admin import stripes
from lmcache_redis.admin.forms import (
    find_missing,
    missing,
    payload_of,
    samples_of,
    size_of,
    sizes_of,
    sizes_read,
)
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import (
    SeenChunk,
    StripeState,
    judge,
    read_idle,
    read_stripes,
    stripes_of,
    survey,
    verify_payload,
)
from lmcache_redis.chunks.frame import HEADER_BYTES, describe_header
from lmcache_redis.chunks.names import account_keys, claim_key
from tests.admin.cache import PAYLOAD_BYTES, Cached, age

CHUNK = Cached(3)


def judged(value: bytes) -> Any:
    return judge(CHUNK.name, 0, len(value), value[:HEADER_BYTES])


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes((value[at] ^ 1,)) + value[at + 1 :]


@pytest.mark.parametrize(
    ("value", "state", "ours"),
    [
        (CHUNK.value(0), StripeState.WHOLE, True),
        (CHUNK.value(0)[:-1], StripeState.WRONG_LENGTH, True),
        (CHUNK.value(0) + b"x", StripeState.WRONG_LENGTH, True),
        (CHUNK.value(1), StripeState.FOREIGN, False),
        (Cached(4).value(0), StripeState.FOREIGN, False),
        (Cached(3, layout="second").value(0), StripeState.FOREIGN, False),
        (flipped(CHUNK.value(0), 100), StripeState.NO_STRIPE, False),
        (flipped(CHUNK.value(0), 4), StripeState.NO_STRIPE, False),
        (b"LMCR", StripeState.NO_STRIPE, False),
        (b"somebody else's", StripeState.NO_STRIPE, False),
    ],
    ids=[
        "whole", "short", "long", "stripe 1", "other chunk", "other layout", "damaged",
        "other version", "magic alone", "foreign",
    ],
)  # fmt: skip
def test_judge(value: bytes, state: StripeState, ours: bool) -> None:
    stripe = judged(value)
    assert (stripe.state, stripe.own is not None) == (state, ours)
    assert bool(stripe.detail) == (state is not StripeState.WHOLE)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_no_changed_header_is_ours(at: int, change: int) -> None:
    value = bytearray(CHUNK.value(0))
    value[at] ^= change
    assert judged(bytes(value)).own is None


def test_read(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client, 0, 2)
    age(client, CHUNK.keys[0], 5000)
    client.pexpire(CHUNK.keys[2], 3_600_000)
    client.lpush(Cached(9).keys[0], "x")
    found = read_stripes(
        server, [(CHUNK.name, 0), (CHUNK.name, 1), (CHUNK.name, 2), (Cached(9).name, 0)]
    )
    states = [StripeState.WHOLE, StripeState.MISSING, StripeState.WHOLE, StripeState.OTHER_TYPE]
    assert [stripe.state for stripe in found] == states
    assert found[0].value_bytes == len(CHUNK.value(0))
    assert found[0].expires_in_s is None
    assert (found[0].idle_s or 0) >= 5000, "read before reading counts as a use"
    assert 3000 < (found[2].expires_in_s or 0) <= 3600


def test_a_damaged_payload_is_found_by_its_checksum(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client)
    client.setrange(CHUNK.keys[1], HEADER_BYTES + 5, b"????")
    found = read_stripes(server, [(CHUNK.name, index) for index in range(3)])
    assert {stripe.state for stripe in found} == {StripeState.WHOLE}
    verified = [verify_payload(server, CHUNK.name, stripe) for stripe in found]
    states = [stripe.state for stripe in verified]
    assert states == [StripeState.WHOLE, StripeState.DAMAGED, StripeState.WHOLE]
    assert verified[1].detail.startswith("its payload's checksum is ")
    client.delete(CHUNK.keys[2])
    assert verify_payload(server, CHUNK.name, found[2]).state is StripeState.MISSING
    faulty = dataclasses.replace(found[0], state=StripeState.NO_STRIPE)
    assert verify_payload(server, CHUNK.name, faulty) is faulty


# ------------------------------------------------------------------- all chunks


def test_every_chunk_is_found_once(server: PrimaryServers, client: Any) -> None:
    chunks = {c.name.chunk_key: c for c in (Cached(n, rank=n % 2) for n in range(300))}
    for chunk in chunks.values():
        chunk.put(client)
    client.set("lmcr2:other", "x")
    client.set("unrelated", "x")
    client.set(claim_key(CHUNK.name.chunk_key, b""), "")
    client.set(*account_keys("team", (1,), b""), 1)
    found = survey(server, b"")
    assert found.chunks.keys() == chunks.keys()
    assert all(seen.indexes == [0, 1, 2] for seen in found.chunks.values())
    assert all(seen.name == chunks[key].name for key, seen in found.chunks.items())
    assert found.other_keys == {b"lmcr2:other"}
    assert found.whole
    assert found.looked_at == found.database_keys == 904


def test_a_sample_is_bounded(
    server: PrimaryServers, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes, "SAMPLE_KEYS", 500)
    for number in range(10):
        Cached(number).put(client)
    assert survey(server, b"", everything=False).whole
    for number in range(10, 600):
        Cached(number).put(client)
    some = survey(server, b"", everything=False)
    assert 100 <= len(some.chunks) < 600
    assert not some.whole
    assert 500 == some.looked_at < some.database_keys
    assert survey(server, b"").whole
    few = survey(server, b"nobody:", everything=False)
    assert (few.chunks, few.whole, few.looked_at) == ({}, False, 500)


def test_all_stripes_of_a_chunk(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(1, stripe_count=5)
    chunk.put(client, 0, 1, 4)
    missing, whole = StripeState.MISSING, StripeState.WHOLE
    states = [stripe.state for stripe in stripes_of(server, chunk.name)]
    assert states == [whole, whole, missing, missing, whole]
    client.delete(chunk.keys[0], chunk.keys[1])
    # Nothing tells how many but stripe 4, which is looked for.
    states = [stripe.state for stripe in stripes_of(server, chunk.name)]
    assert states == [missing, missing, missing, missing, whole]
    client.delete(chunk.keys[4])
    assert [stripe.state for stripe in stripes_of(server, chunk.name, 3)] == [missing, missing]


def test_looking_is_no_use(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(1)
    chunk.put(client)
    for key in chunk.keys:
        age(client, key, 5000)
    chunks = list(survey(server, b"").chunks.values())
    header = describe_header(Cached(1, stripe_count=4).value(0))
    find_missing(server, [(seen, header) for seen in chunks])
    each = [SeenChunk(chunk.name, 1 << index) for index in range(3)]
    assert all(isinstance(idle, int) and idle >= 5000 for idle in read_idle(server, each))


@pytest.mark.parametrize("index", range(3))
def test_any_stripe_tells_how_its_chunk_is_cut(index: int) -> None:
    chunk = Cached(1)
    header = describe_header(chunk.value(index))
    assert payload_of(header) == PAYLOAD_BYTES
    assert size_of(header, 0b111) == chunk.value_bytes
    for only in range(3):
        assert size_of(header, 1 << only) == len(chunk.value(only))
    assert size_of(header, 0b11000) == 0
    assert missing(header, 0b101) == [1]


def test_cuts_come_from_whole_headers_alone(server: PrimaryServers, client: Any) -> None:
    for number in range(4):
        client.set(Cached(number).keys[0], "no header")
    Cached(5).put(client)
    client.set(Cached(1, model="broken").keys[0], "no header")
    chunks = list(survey(server, b"").chunks.values())
    ((_, header, share),) = samples_of(server, chunks).values()
    assert share == 1
    assert (header.chunk_bytes, payload_of(header)) == (Cached().chunk_bytes, PAYLOAD_BYTES)


def test_how_far_one_chunk_is_packed_is_taken_for_all(server: PrimaryServers, client: Any) -> None:
    packed = [Cached(number, packed_bytes=1000, stripe_count=5) for number in range(3)]
    for chunk in packed:
        chunk.put(client)
    seen = list(survey(server, b"").chunks.values())
    (sample,) = samples_of(server, seen).values()
    sizes = [sizes_of(sample, each.stripes) for each in seen]
    stored = sum(client.strlen(key) for key in packed[0].keys)
    assert {each.stored for each in sizes} == {stored} == {5 * 640 + 4 * 1000 + 100}
    assert {each.plain for each in sizes} == {packed[0].value_bytes}
    read = read_stripes(server, [(packed[0].name, index) for index in range(5)])
    assert sizes_read(read) == sizes[0]
    client.delete(packed[0].keys[1])
    assert sizes_of(sample, 0b11101).plain == packed[0].value_bytes - 640 - PAYLOAD_BYTES
    assert sizes_of(sample, 0b1111111) == sizes[0], "two are left over from smaller slots"


def test_stripes_that_came_during_the_scan_count(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(1)
    chunk.put(client)
    client.delete(chunk.keys[2])
    seen = SeenChunk(chunk.name, 0b001)
    find_missing(server, [(seen, None)])
    assert seen.stripes == 0b001
    find_missing(server, [(seen, describe_header(chunk.value(0)))])
    assert seen.stripes == 0b011
