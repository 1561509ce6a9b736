# SPDX-License-Identifier: Apache-2.0
"""Lookups of engines of several nodes: rows whose parts other nodes load from the last tier."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.chunks.names import Reach
from tests.cache.test_hybrid_lookup import ALL, CHUNK, HASHES, STATE, WINDOW, Model

CHUNKS = 8
look_up = partial(Model.look_up, chunks=CHUNKS)


def test_one_scan_asks_for_the_missing_and_the_remote() -> None:
    nodes = Model([ALL], [ALL])
    nodes.store(0, range(8))
    nodes.store(1, range(6))
    assert look_up(nodes) == 6
    every = [(chunk, row) for chunk in range(8) for row in range(2)]
    assert nodes.redis.questions == [("scan", nodes.keys(*every))]
    assert nodes.redis.loaded == nodes.keys(*((chunk, 0) for chunk in range(6)))
    assert nodes.counted("miss_") == {"miss_absent": 2}


def test_what_this_node_has_does_not_count_for_others() -> None:
    """The other node cannot load it before it is in Redis, even if the bytes are the same."""
    nodes = Model([ALL], [ALL])
    nodes.forms[1] = nodes.forms[0]
    nodes.hold_all(0, CHUNKS)
    nodes.disk.stored.update(nodes.keys(*((chunk, 0) for chunk in range(8))))
    assert look_up(nodes) == 0
    nodes.store(1, range(5))
    assert look_up(nodes) == 5
    assert nodes.redis.loaded == nodes.disk.loaded == []


def test_windows_of_other_nodes_are_asked_about_not_loaded() -> None:
    nodes = Model([ALL, WINDOW], [ALL, WINDOW, STATE])
    for row in range(4):
        nodes.store(row, range(8))
    nodes.store(4, [2, 5])
    assert look_up(nodes) == 6
    assert [kind for kind, _ in nodes.redis.questions] == ["scan", "scan", "exists"]
    loaded = [(chunk, 0) for chunk in range(6)] + [(4, 1), (5, 1)]
    assert sorted(nodes.redis.loaded) == sorted(nodes.keys(*loaded))


def test_a_lookup_without_an_answer_ends_at_its_deadline() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Model(reaches, reaches)
        for row in range(len(reaches)):
            nodes.hold_all(row, CHUNKS)
        nodes.redis.silent_from = 0
        lookup = nodes.begin(chunks=CHUNKS)
        nodes.settle()
        lookup._expire()
        assert nodes.answer() == 0


def test_a_node_without_workers_only_asks() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Model([], reaches)
        for row in range(len(reaches)):
            nodes.store(row, range(7))
        assert look_up(nodes) == 7
        assert nodes.redis.loaded == []


_REACHES = st.lists(st.sampled_from([ALL, STATE, WINDOW]), min_size=1, max_size=2)


@given(_REACHES, _REACHES, st.data())
def test_the_prefix_is_the_longest_that_every_node_can_have(
    local: list[Reach], remote: list[Reach], data: st.DataObject
) -> None:
    nodes = Model(local, remote)
    chunks = st.lists(st.sampled_from(range(8)), max_size=8) | st.just([*range(8)])
    found: set[Part] = set()
    for row in range(len(nodes.reaches)):
        stored, held = data.draw(chunks), data.draw(chunks)
        nodes.store(row, stored)
        for chunk in set(held):
            nodes.hold(HASHES[chunk], nodes.forms[row])
        found |= {(chunk, row) for chunk in stored}
        found |= {(chunk, row) for chunk in held if row < nodes.local}
    needs = PrefixNeeds(nodes.reaches, 0, CHUNK)
    assert look_up(nodes) == max(n for n in range(9) if {*needs.parts(n)} <= found)
