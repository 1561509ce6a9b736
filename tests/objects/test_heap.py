# SPDX-License-Identifier: Apache-2.0
"""Reuse of heap memory, and a pool over it: exact limits, chunks without a key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_redis.cache.pool import Entry, HostPool
from lmcache_redis.native.madvise import address_of
from lmcache_redis.objects.cache import HeapMemory
from tests.cache.auditing import audit

MIB = 1 << 20


def test_memory_is_used_again_for_the_same_size() -> None:
    memory = HeapMemory(spare_bytes=8 * MIB)
    first = memory.take(MIB)
    at = address_of(first)
    assert (first.nbytes, memory.spare_bytes) == (MIB, 0)
    memory.give_back(first)
    assert memory.spare_bytes == MIB
    other = memory.take(MIB - 1000)
    assert (address_of(other) != at, other.nbytes) == (True, MIB - 1000)
    again = memory.take(MIB)
    assert (address_of(again), again.nbytes) == (at, MIB)
    assert memory.spare_bytes == 0


def test_no_more_is_kept_than_was_said_and_what_was_used_last() -> None:
    memory = HeapMemory(spare_bytes=4 * MIB)
    large, small = [memory.take(2 * MIB) for _ in range(3)], [memory.take(MIB) for _ in range(3)]
    for block in large:
        memory.give_back(block)
    assert memory.spare_bytes == 4 * MIB
    for block in small:
        memory.give_back(block)
    assert memory.spare_bytes == 3 * MIB
    held = [memory.take(MIB) for _ in range(3)]
    assert memory.spare_bytes == 0
    memory.give_back(held[0])
    memory.close()
    memory.give_back(held[1])
    assert memory.spare_bytes == 0


def test_views_are_the_stripes_of_a_block() -> None:
    memory = HeapMemory()
    block = memory.take(10)
    views = memory.views(block, (4, 4, 2))
    assert [view.nbytes for view in views] == [4, 4, 2]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * len(view)
    (whole,) = memory.views(block, (10,))
    assert whole == bytes([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert memory.units((4, 4, 2)) == 10


def test_memory_that_cannot_be_had() -> None:
    pool = HostPool(HeapMemory())
    assert pool.reserve(b"a", 1 << 60) is None
    assert pool.used == 0
    audit(pool)


@pytest.mark.parametrize(("key", "publish_as"), [(b"a", b"a"), (b"a", b"b"), (None, None)])
def test_a_key_is_given_once(key: bytes | None, publish_as: bytes | None) -> None:
    pool = HostPool(HeapMemory())
    entry = pool.reserve(key, 1)
    assert entry is not None
    with pytest.raises(RuntimeError):
        pool.publish(entry, publish_as)
    audit(pool)


CAPACITY, IDLE = 40, 20
KEYS = [bytes([n]) for n in range(4)]


class HeapMachine(RuleBasedStateMachine):
    """The model: ``idle`` is the eviction order, ``pins`` has all other entries."""

    def __init__(self) -> None:
        super().__init__()
        memory = HeapMemory()
        memory.capacity = CAPACITY
        self.pool = HostPool(memory, IDLE)
        self.index: dict[bytes, Entry] = {}
        self.idle: list[Entry] = []
        self.pins: dict[Entry, int] = {}
        self.filling: list[Entry] = []

    def _evict(self, fits: Callable[[], bool]) -> None:
        while not fits():
            gone = self.idle.pop(0)
            del self.index[gone.key]

    def _used(self) -> int:
        return sum(entry.units for entry in {*self.idle, *self.pins})

    @rule(units=st.integers(1, CAPACITY + 1))
    def reserve(self, units: int) -> None:
        entry = self.pool.reserve(None, units)
        if units > CAPACITY - sum(each.units for each in self.pins):
            assert entry is None
            return
        assert entry is not None
        self._evict(lambda: self._used() + units <= CAPACITY)
        self.pins[entry] = 1
        self.filling.append(entry)

    @precondition(lambda self: self.filling)
    @rule(key=st.sampled_from(KEYS), data=st.data())
    def publish(self, key: bytes, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.filling))
        self.filling.remove(entry)
        assert self.pool.publish(entry, key)
        old = self.index.get(key)
        if old in self.idle:
            self.idle.remove(old)
        self.index[key] = entry

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.filling))
        self.filling.remove(entry)
        del self.pins[entry]
        self.pool.discard(entry)
        self.pool.unpin(entry)

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: bytes) -> None:
        entry = self.pool.get(key)
        assert entry is self.index.get(key)
        if entry is not None:
            self.pool.pin(entry)
            self.pins[entry] = self.pins.get(entry, 0) + 1
            if entry in self.idle:
                self.idle.remove(entry)

    @precondition(lambda self: set(self.pins) - set(self.filling))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([e for e in self.pins if e not in self.filling]))
        self.pool.unpin(entry)
        self.pins[entry] -= 1
        if self.pins[entry]:
            return
        del self.pins[entry]
        if self.index.get(entry.key) is entry:
            if entry.units > IDLE:
                del self.index[entry.key]  # only this one, not the older ones
                return
            self.idle.append(entry)
            self._evict(lambda: sum(each.units for each in self.idle) <= IDLE)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: bytes) -> None:
        entry = self.index.pop(key, None)
        assert self.pool.get(key) is entry
        if entry is not None:
            self.pool.discard(entry)
            if entry in self.idle:
                self.idle.remove(entry)

    @invariant()
    def agrees(self) -> None:
        audit(self.pool)
        assert {entry.key: entry for entry in self.pool} == self.index
        assert self.pool.used == self._used() <= CAPACITY
        assert self.pool.idle == sum(entry.units for entry in self.idle) <= IDLE
        assert list(self.pool._idle.values()) == self.idle


HeapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstTheModel = HeapMachine.TestCase
