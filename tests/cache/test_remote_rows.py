# SPDX-License-Identifier: Apache-2.0
"""Lookups of engines of several nodes: rows whose parts other nodes load from the last tier."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry
from lmcache_redis.chunks.names import ChunkForm, PartNames, Reach
from lmcache_redis.tier_kinds import DISK, REDIS
from lmcache_redis.tiers import CallOutcome
from tests.cache.played import World
from tests.cache.test_hybrid_lookup import StoredTier, forms_of
from tests.harness import block_hashes

CHUNK = 256
HASHES = block_hashes("prompt", 8)
KEYS_OF_ROW_0 = [(chunk, 0) for chunk in range(8)]
ALL, STATE, WINDOW = Reach(), Reach("state"), Reach("window", 512)


def names_of(form: ChunkForm) -> PartNames:
    return PartNames(form.names, form.model_name, form.kv_rank, reach=form.reach)


class Nodes(World):
    """Rows of this node and remote ones, a disk with an index and Redis.

    equal: the last remote row has the names of row 0.
    """

    def __init__(
        self, local: Sequence[Reach], remote: Sequence[Reach], *, equal: bool = False
    ) -> None:
        self.reaches = [*local, *remote]
        self.forms = forms_of(self.reaches)
        if equal:
            self.forms[-1] = self.forms[0]
        self.local = len(local)
        self.disk = StoredTier("disk", set(), indexed=True)
        self.redis = StoredTier("Redis", set())
        super().__init__([(self.disk, DISK), (self.redis, REDIS)])

    def keys(self, *parts: Part) -> list[bytes]:
        return [self.forms[row].key(HASHES[chunk]) for chunk, row in parts]

    def store(self, row: int, chunks: Sequence[int]) -> None:
        self.redis.stored.update(self.keys(*((chunk, row) for chunk in chunks)))

    def hold_all(self, row: int) -> None:
        for chunk_hash in HASHES:
            self.hold(chunk_hash, self.forms[row])

    def look_up(self, deadline_s: float = 60.0) -> int:
        """The length found. Checks that only this node's parts are held; releases them."""
        answers: list[tuple[int, dict[Part, Entry]]] = []
        request = LookupRequest(
            self.forms[: self.local],
            HASHES,
            time.monotonic() + deadline_s,
            chunk_tokens=CHUNK,
            remote=[names_of(form) for form in self.forms[self.local :]],
        )
        lookup = PrefixLookup(
            self.cache, request, lambda found: answers.append((found.bound, found.parts.take()))
        )
        lookup.start()
        self.run(lambda: answers and not self.cache.backlog and not self.loop._posted)
        ((length, held),) = answers
        needs = PrefixNeeds(self.reaches, 0, CHUNK).parts(length)
        assert sorted(held) == sorted(part for part in needs if part[1] < self.local)
        for entry in held.values():
            self.cache.pool.unpin(entry)
        self.close()
        return length


def test_one_scan_asks_for_the_missing_and_the_remote() -> None:
    nodes = Nodes([ALL], [ALL])
    nodes.store(0, range(8))
    nodes.store(1, range(6))
    assert nodes.look_up() == 6
    every = [(chunk, row) for chunk in range(8) for row in range(2)]
    assert nodes.redis.questions == [("scan", nodes.keys(*every))]
    assert nodes.redis.loaded == nodes.keys(*((chunk, 0) for chunk in range(6)))
    assert nodes.counted("miss_") == {"miss_absent": 2}


def test_what_this_node_has_does_not_count_for_others() -> None:
    """The other node cannot load it before it is in Redis, even if the bytes are the same."""
    nodes = Nodes([ALL], [ALL], equal=True)
    nodes.hold_all(0)
    nodes.disk.stored.update(nodes.keys(*((chunk, 0) for chunk in range(8))))
    assert nodes.look_up() == 0
    nodes.store(1, range(5))
    assert nodes.look_up() == 5
    assert nodes.redis.loaded == nodes.disk.loaded == []


def test_windows_of_other_nodes_are_asked_about_not_loaded() -> None:
    nodes = Nodes([ALL, WINDOW], [ALL, WINDOW, STATE])
    for row in range(4):
        nodes.store(row, range(8))
    nodes.store(4, [2, 5])
    assert nodes.look_up() == 6
    assert [kind for kind, _ in nodes.redis.questions] == ["scan", "scan", "exists"]
    loaded = [(chunk, 0) for chunk in range(6)] + [(4, 1), (5, 1)]
    assert sorted(nodes.redis.loaded) == sorted(nodes.keys(*loaded))


def test_without_redis_another_node_can_load_nothing() -> None:
    nodes = Nodes([ALL], [ALL])
    nodes.hold_all(0)
    nodes.redis.fails = CallOutcome.UNAVAILABLE
    assert nodes.look_up() == 0


def test_a_lookup_without_an_answer_ends_at_its_deadline() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Nodes(reaches, reaches)
        for row in range(len(reaches)):
            nodes.hold_all(row)
        nodes.redis.silent_from = 0
        assert nodes.look_up(deadline_s=0.05) == 0


def test_a_node_without_workers_only_asks() -> None:
    for reaches in ([ALL], [ALL, WINDOW]):
        nodes = Nodes([], reaches)
        for row in range(len(reaches)):
            nodes.store(row, range(7))
        assert nodes.look_up() == 7
        assert nodes.redis.loaded == []


_REACHES = st.lists(st.sampled_from([ALL, STATE, WINDOW]), min_size=1, max_size=2)


@given(_REACHES, _REACHES, st.data())
def test_the_prefix_is_the_longest_that_every_node_can_have(
    local: list[Reach], remote: list[Reach], data: st.DataObject
) -> None:
    nodes = Nodes(local, remote)
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
    assert nodes.look_up() == max(n for n in range(9) if {*needs.parts(n)} <= found)
