"""Which chunks are found, how they are cut, and that looking changes nothing."""

from __future__ import annotations

from typing import Any

from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import State
from lmcache_redis.admin.survey import stripes_of, survey
from tests.admin.cache import Cached


def test_every_chunk_is_found_once(server: Server, client: Any) -> None:
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


def test_a_sample_is_bounded(server: Server, client: Any) -> None:
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


def test_only_the_layouts_asked_for(server: Server, client: Any) -> None:
    first, second = Cached(1), Cached(1, layout="second")
    first.put(client)
    second.put(client)
    for namespaces in (frozenset({first.name.namespace}), frozenset({first.name.namespace, b"x"})):
        assert list(survey(server, b"", namespaces=namespaces).chunks) == [first.name.chunk_key]


def test_all_stripes_of_a_chunk(server: Server, client: Any) -> None:
    chunk = Cached(1, stripe_count=5)
    chunk.put(client, 0, 1, 4)
    missing, whole = State.MISSING, State.WHOLE
    states = [stripe.state for stripe in stripes_of(server, chunk.name)]
    assert states == [whole, whole, missing, missing, whole]
    client.delete(chunk.keys[0], chunk.keys[1])
    # Nothing tells how many but stripe 4, which is looked for.
    states = [stripe.state for stripe in stripes_of(server, chunk.name)]
    assert states == [missing, missing, missing, missing, whole]
    client.delete(chunk.keys[4])
    assert [stripe.state for stripe in stripes_of(server, chunk.name, 3)] == [missing, missing]
