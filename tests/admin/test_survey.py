"""Which chunks are found, how they are cut, and that looking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import (
    SeenChunk,
    StripeState,
    Striping,
    headers_of,
    present_of,
    read_uses,
    stripes_of,
    survey,
)
from lmcache_redis.chunks.frame import describe_header
from tests.admin.cache import PAYLOAD_BYTES, Cached, age


def test_every_chunk_is_found_once(server: PrimaryServers, client: Any) -> None:
    chunks = {c.name.chunk_key: c for c in (Cached(n, rank=n % 2) for n in range(300))}
    for chunk in chunks.values():
        chunk.put(client)
    client.set("lmcr1:other", "x")
    client.set("unrelated", "x")
    found = survey(server, b"")
    assert found.chunks.keys() == chunks.keys()
    assert all(seen.indexes == [0, 1, 2] for seen in found.chunks.values())
    assert all(seen.name == chunks[key].name for key, seen in found.chunks.items())
    assert found.other_keys == {b"lmcr1:other"}
    assert found.whole
    assert found.looked_at == found.database_keys == 902


def test_a_sample_is_bounded(server: PrimaryServers, client: Any) -> None:
    for number in range(10):
        Cached(number).put(client)
    assert survey(server, b"", most_chunks=10).whole, "enough only with the very last step"
    for number in range(10, 600):
        Cached(number).put(client)
    some = survey(server, b"", most_chunks=50)
    assert 50 <= len(some.chunks) < 600
    assert not some.whole
    assert 0 < some.looked_at < some.database_keys
    assert survey(server, b"", most_chunks=601).whole
    few = survey(server, b"nobody:", most_keys=500)
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
    present_of(server, [(seen, Striping(0, 0, 4)) for seen in chunks])
    assert all((use.idle_s or 0) >= 5000 for use in read_uses(server, chunk.keys))


@pytest.mark.parametrize("index", range(3))
def test_any_stripe_tells_how_its_chunk_is_cut(index: int) -> None:
    chunk = Cached(1)
    cut = Striping.of(describe_header(chunk.value(index)))
    assert cut == Striping(chunk.chunk_bytes, PAYLOAD_BYTES, 3)
    assert cut.value_bytes(0b111) == chunk.value_bytes
    for only in range(3):
        assert cut.value_bytes(1 << only) == len(chunk.value(only))
    assert cut.value_bytes(0b11000) == 0
    assert cut.missing(0b101) == [1]


def test_a_chunk_of_one_stripe() -> None:
    chunk = Cached(1, stripe_count=1)
    cut = Striping.of(describe_header(chunk.value(0)))
    assert cut == Striping(100, 100, 1)
    assert cut.value_bytes(1) == chunk.value_bytes == 612


def test_cuts_come_from_whole_headers_alone(server: PrimaryServers, client: Any) -> None:
    server.nodes[0].untouched = True
    for number in range(4):
        client.set(Cached(number).keys[0], "no header")
    Cached(5).put(client)
    client.set(Cached(1, model="broken").keys[0], "no header")
    chunks = list(survey(server, b"").chunks.values())
    cuts = [Striping.of(header) for header in headers_of(server, chunks).values()]
    assert cuts == [Striping(Cached().chunk_bytes, PAYLOAD_BYTES, 3)]


def test_stripes_that_came_during_the_scan_count(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(1)
    chunk.put(client)
    client.delete(chunk.keys[2])
    seen = SeenChunk(chunk.name, 0b001)
    assert present_of(server, [(seen, Striping(chunk.chunk_bytes, PAYLOAD_BYTES, 3))]) == [0b011]
    assert present_of(server, [(seen, None)]) == [0b001]
