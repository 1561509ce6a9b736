"""What a value is called, and that nothing but a whole header of its key counts as ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import StripeState, judge, read_stripes, read_uses, verify_payload
from lmcache_redis.chunks.frame import HEADER_BYTES
from tests.admin.cache import Cached, age

CHUNK = Cached(3)


def judged(value: bytes, chunk: Cached = CHUNK, index: int = 0) -> Any:
    return judge(chunk.name, index, len(value), value[:HEADER_BYTES])


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


def test_both_ways_to_write_a_namespace_are_ours() -> None:
    raw = Cached(3, raw_namespace=True)
    assert judged(raw.value(0), raw).state is StripeState.WHOLE


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_no_changed_header_is_ours(at: int, change: int) -> None:
    value = bytearray(CHUNK.value(0))
    value[at] ^= change
    assert judged(bytes(value)).own is None


def test_read(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client, 0, 2)
    client.pexpire(CHUNK.keys[2], 3_600_000)
    client.lpush(Cached(9).keys[0], "x")
    found = read_stripes(
        server, [(CHUNK.name, 0), (CHUNK.name, 1), (CHUNK.name, 2), (Cached(9).name, 0)]
    )
    states = [StripeState.WHOLE, StripeState.MISSING, StripeState.WHOLE, StripeState.OTHER_TYPE]
    assert [stripe.state for stripe in found] == states
    assert found[0].value_bytes == len(CHUNK.value(0))
    assert found[0].expires_in_s is None
    assert 3000 < (found[2].expires_in_s or 0) <= 3600


def test_idle_times_are_read_before_reading_counts_as_a_use(
    server: PrimaryServers, client: Any
) -> None:
    CHUNK.put(client)
    age(client, CHUNK.keys[0], 5000)
    (stripe,) = read_stripes(server, [(CHUNK.name, 0)])
    assert stripe.use.idle_s is not None
    assert stripe.use.idle_s >= 5000


def test_asking_when_a_key_was_used_is_no_use(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client)
    age(client, CHUNK.keys[0], 5000)
    for _ in range(2):
        used, absent = read_uses(server, [CHUNK.keys[0], CHUNK.name.stripe(9)])
        assert used.idle_s is not None
        assert used.idle_s >= 5000
        assert absent.idle_s is None
        assert not absent.refused


def test_a_damaged_payload_is_found_by_its_checksum(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client)
    client.setrange(CHUNK.keys[1], HEADER_BYTES + 5, b"????")
    found = read_stripes(server, [(CHUNK.name, index) for index in range(3)])
    assert {stripe.state for stripe in found} == {StripeState.WHOLE}
    states = [verify_payload(server, CHUNK.name, stripe).state for stripe in found]
    assert states == [StripeState.WHOLE, StripeState.DAMAGED, StripeState.WHOLE]
    client.delete(CHUNK.keys[2])
    assert verify_payload(server, CHUNK.name, found[2]).state is StripeState.MISSING
    faulty = dataclasses.replace(found[0], state=StripeState.NO_STRIPE)
    assert verify_payload(server, CHUNK.name, faulty) is faulty
