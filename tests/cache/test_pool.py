# SPDX-License-Identifier: Apache-2.0
"""The host pool against a simple model, and the arena's memory."""

from __future__ import annotations

import gc
import os
import threading
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.pool import Entry, EntryState, HostPool
from tests.cache.auditing import audit, slots

PAGE = 4096


def test_a_watcher_that_is_told_may_be_forgotten_by_another() -> None:
    """A lookup that ends as one of its parts fails lets go of all of them."""
    pool = HostPool(slots(4))
    entry = pool.reserve(b"key", 2)
    assert entry is not None
    told: list[str] = []
    pool.watch(entry, lambda: pool.unwatch(entry, second))

    def second() -> None:
        told.append("second")

    pool.watch(entry, second)
    pool.unwatch(entry, lambda: None)  # never watched
    pool.end(entry, is_filled=False)
    assert told == ["second"]
    audit(pool)


def slot_of(arena: Arena, slot: int, nbytes: int) -> memoryview:
    """The first bytes of a slot."""
    (view,) = arena.views((slot,), (nbytes,))
    return view


class TestArena:
    def test_slots_are_page_aligned_and_apart(self) -> None:
        pool = Arena(10 * 2 * PAGE, PAGE + 1)
        assert pool.capacity == 10
        assert pool.slot_stride_bytes == 2 * PAGE
        assert pool.base_address % PAGE == 0
        for slot in range(pool.capacity):
            slot_of(pool, slot, PAGE + 1)[:] = bytes([slot + 1]) * (PAGE + 1)
        for slot in range(pool.capacity):
            assert slot_of(pool, slot, PAGE + 1) == bytes([slot + 1]) * (PAGE + 1)

    def test_a_view_has_exactly_the_bytes_asked_for(self) -> None:
        pool = Arena(4 * PAGE, PAGE)
        for nbytes in (1, PAGE):
            assert slot_of(pool, 3, nbytes).nbytes == nbytes
        with pytest.raises(IndexError):
            slot_of(pool, 0, PAGE + 1)

    @pytest.mark.parametrize(
        ("sizes", "slots"),
        [
            ([PAGE] * 3, 3),
            ([PAGE, PAGE, PAGE - 1], 3),
            ([1000] * 8, 2),  # four in a slot
            ([1000] * 7 + [999], 2),
            ([1000] * 9, 3),
            ([PAGE // 2] * 5, 3),
            ([PAGE // 2 + 1] * 2, 2),
            ([PAGE - 1000, 1000] * 4, 4),  # of shares: the short ones fill the room that is left
            ([PAGE - 900, 1000] * 4, 5),
        ],
    )
    def test_small_stripes_lie_side_by_side(self, sizes: list[int], slots: int) -> None:
        pool = Arena(10 * PAGE, PAGE)
        assert pool.units(sizes) == slots
        block, other = pool.take(slots), pool.take(slots)
        for number, each in enumerate((block, other), 1):
            views = pool.views(each, sizes)
            assert [len(view) for view in views] == sizes
            for index, view in enumerate(views):
                view[:] = bytes([16 * number + index]) * len(view)
        for number, each in enumerate((block, other), 1):
            for index, view in enumerate(pool.views(each, sizes)):
                assert view == bytes([16 * number + index]) * len(view)

    def test_as_many_stripes_as_can_be_numbered(self) -> None:
        pool = Arena(PAGE, PAGE)
        assert pool.units([PAGE] * 0xFFFF) == 0xFFFF
        assert pool.units([PAGE - 100, 100] * 0x7FFF) == 0x7FFF

    def test_what_fills_no_slot_is_not_used(self) -> None:
        pool = Arena(4 * PAGE - 1, PAGE)
        assert (pool.capacity, pool.size_bytes) == (3, 3 * PAGE)

    @pytest.mark.parametrize(("size_bytes", "slot_bytes"), [(PAGE - 1, 1), (0, 1), (PAGE, 0)])
    def test_sizes_that_cannot_be(self, size_bytes: int, slot_bytes: int) -> None:
        with pytest.raises(ValueError, match="slot"):
            Arena(size_bytes, slot_bytes)

    def test_prefault_takes_the_memory_and_keeps_contents(self) -> None:
        pool = Arena(64 << 20, 1 << 20)
        slot_of(pool, 5, 3)[:] = b"abc"
        before = resident_bytes()
        assert pool.prefault(threading.Event())
        assert resident_bytes() - before > 60 << 20
        assert slot_of(pool, 5, 3) == b"abc"

    def test_prefault_says_how_far_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory before that may be pinned meanwhile."""
        pool = Arena(5 << 20, 1 << 20)
        done_bytes = []
        monkeypatch.setattr(
            "lmcache_redis.cache.arena.fault_in",
            lambda _, nbytes, for_write: done_bytes.append((pool.prefaulted_bytes, nbytes)) or True,
        )
        assert pool.prefault(threading.Event())
        mib = 1 << 20
        assert done_bytes == [(0, 2 * mib), (2 * mib, 2 * mib), (4 * mib, mib)]
        assert pool.prefaulted_bytes == 5 << 20

    def test_prefault_leaves_the_cores_to_engines_that_compute(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On two cores it takes a twentieth of one while requests run, but not near of use."""
        mib = 1 << 20
        pool = Arena(12 * mib, mib)
        pool.take(2)
        now_s = [0.0]
        pauses_s: list[float | None] = []

        def fault_in(*_: object, for_write: bool) -> bool:
            now_s[0] += 1.0
            return True

        class Stop(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                pauses_s.append(timeout)
                return False

        clock = SimpleNamespace(monotonic=lambda: now_s[0])
        cores = SimpleNamespace(sched_getaffinity=lambda _: {0, 1})
        patches = {"fault_in": fault_in, "time": clock, "os": cores, "_NEAR_BYTES": 4 * mib}
        for name, value in patches.items():
            monkeypatch.setattr(f"lmcache_redis.cache.arena.{name}", value)
        requests = iter([1, 1, 0])  # asked only for what is far ahead
        assert pool.prefault(Stop(), lambda: next(requests) > 0)
        assert pauses_s == pytest.approx([1.0, 1.0, 1.0, 19.0, 19.0, 1.0])

    def test_prefault_stops(self) -> None:
        pool = Arena(64 << 20, 1 << 20)
        stop = threading.Event()
        stop.set()
        before = resident_bytes()
        assert not pool.prefault(stop)
        assert resident_bytes() - before < 32 << 20
        assert pool.prefaulted_bytes == pool.size_bytes, "nothing is waited for"

    def test_close_gives_the_memory_back(self) -> None:
        pool = Arena(64 << 20, 1 << 20)
        address = pool.base_address
        assert mapped(address)
        pool.close()
        pool.close()
        assert not mapped(address)

    def test_close_with_a_view_out_waits_for_the_view(self) -> None:
        pool = Arena(64 << 20, 1 << 20)
        address = pool.base_address
        view = slot_of(pool, 0, 8)
        pool.close()
        view[:] = b"still ok"
        assert mapped(address)
        view.release()
        del pool
        gc.collect()
        assert not mapped(address)


class TestHostPool:
    def test_what_stays_without_pins_is_bounded(self) -> None:
        pool = HostPool(slots(4), idle_limit=2)
        told: list[bool] = []
        pool.on_evicted = lambda: told.append(b"a" in pool)
        for key in (b"a", b"b", b"c"):
            ready(pool, key)
        assert [entry.key for entry in pool] == [b"b", b"c"]
        assert (told, pool.free) == ([False], 2)
        audit(pool)

    def test_what_is_larger_than_may_stay_leaves_the_others(self) -> None:
        pool = HostPool(slots(8), idle_limit=2)
        for key, n_slots in ((b"a", 1), (b"large", 3), (b"b", 1)):
            ready(pool, key, n_slots)
        assert [entry.key for entry in pool] == [b"a", b"b"]
        audit(pool)

    def test_what_is_said_to_be_used_least_goes_first(self) -> None:
        pool = HostPool(slots(3))
        held, *_ = (ready(pool, key) for key in (b"a", b"b", b"c"))
        pool.pin(held)
        for key in (b"c", b"a", b"never"):
            pool.touch_least(key)
        assert pool.reserve(b"d", 1) is not None
        assert [entry.key for entry in pool] == [b"a", b"b", b"d"]
        pool.unpin(held)
        audit(pool)

    def test_a_filling_ends_once(self) -> None:
        pool = HostPool(slots(2))
        entry = pool.reserve(b"a", 1)
        assert entry is not None
        pool.pin(entry)
        assert pool.end(entry, is_filled=True)
        with pytest.raises(RuntimeError, match="ended twice"):
            pool.end(entry, is_filled=False)
        with pytest.raises(RuntimeError, match="after its filling ended"):
            pool.watch(entry, lambda: None)
        assert (entry.pins, entry.state) == (1, EntryState.READY)

    @pytest.mark.parametrize(
        "break_it",
        [
            lambda pool, entry: pool.memory._free.append(entry.block[0]),
            lambda pool, entry: pool.memory._free.pop(),
            lambda pool, entry: setattr(entry, "pins", 2),
            lambda pool, entry: setattr(entry, "state", EntryState.FILLING),
            lambda pool, entry: setattr(entry, "key", b"other"),
            lambda pool, entry: pool._idle.clear(),
            lambda pool, entry: setattr(pool, "idle", 0),
        ],
    )
    def test_the_audit_finds_broken_books(self, break_it) -> None:
        pool = HostPool(slots(3))
        entry = ready(pool, b"a")
        audit(pool)
        break_it(pool, entry)
        with pytest.raises(RuntimeError):
            audit(pool)


SLOTS = 7
KEYS = [bytes([n]) for n in range(5)]


class PoolMachine(RuleBasedStateMachine):
    """The model: ``idle`` is the eviction order, ``held`` has the pinned entries."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(slots(SLOTS))
        self.index: dict[bytes, Entry] = {}
        self.idle: list[Entry] = []
        self.pins: dict[Entry, int] = {}
        self.state: dict[Entry, EntryState] = {}
        self.evictions = self.told_evictions = 0
        self.pool.on_evicted = self.evicted
        self.told: set[bytes] = set()
        self.pool.on_change = self.tell

    def tell(self, key: bytes, tier: int | None, there: bool) -> None:
        assert tier is None
        assert (key in self.told) is not there, "only what has changed"
        (self.told.add if there else self.told.remove)(key)

    def evicted(self) -> None:
        self.told_evictions += 1

    def used(self) -> int:
        return sum(entry.units for entry in {*self.idle, *self.pins})

    @rule(key=st.sampled_from(KEYS), n_slots=st.integers(0, SLOTS + 1))
    def reserve(self, key: bytes, n_slots: int) -> None:
        if key in self.index or not n_slots:
            with pytest.raises(RuntimeError):
                self.pool.reserve(key, n_slots)
            return
        pinned = sum(entry.units for entry in self.pins)
        entry = self.pool.reserve(key, n_slots)
        if n_slots > SLOTS - pinned:
            assert entry is None
            return
        assert entry is not None
        while self.used() + n_slots > SLOTS:
            gone = self.idle.pop(0)
            del self.index[gone.key]
            self.state[gone] = EntryState.DISCARDED
            self.evictions += 1
        taken = {slot for other in {*self.idle, *self.pins} for slot in other.block}
        assert len(set(entry.block)) == n_slots
        assert not taken & set(entry.block)
        self.index[key] = entry
        self.pins[entry] = 1
        self.state[entry] = EntryState.FILLING

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: bytes) -> None:
        self.pool.touch_all((key,))
        if (entry := self.index.get(key)) in self.idle:
            self.idle.remove(entry)
            self.idle.append(entry)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.pins)))
        if self.state[entry] is EntryState.READY:
            with pytest.raises(RuntimeError):
                self.pool.publish(entry)
        else:
            assert self.pool.publish(entry) is (self.state[entry] is EntryState.FILLING)
            if self.state[entry] is EntryState.FILLING:
                self.state[entry] = EntryState.READY

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.state)))
        self.pool.discard(entry)
        if self.state[entry] is not EntryState.DISCARDED:
            self.state[entry] = EntryState.DISCARDED
            del self.index[entry.key]
            if entry in self.idle:
                self.idle.remove(entry)

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.state)))
        if entry in self.pins:
            self.pool.pin(entry)
            self.pins[entry] += 1
        elif entry in self.idle:
            self.pool.pin(entry)
            self.idle.remove(entry)
            self.pins[entry] = 1
        else:
            with pytest.raises(RuntimeError):
                self.pool.pin(entry)

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.state)))
        filling = self.state[entry] is EntryState.FILLING
        if entry not in self.pins or (self.pins[entry] == 1 and filling):
            with pytest.raises(RuntimeError):
                self.pool.unpin(entry)
            return
        self.pool.unpin(entry)
        self.pins[entry] -= 1
        if not self.pins[entry]:
            del self.pins[entry]
            if self.state[entry] is EntryState.READY:
                self.idle.append(entry)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        for entry in self.index.values():
            self.state[entry] = EntryState.DISCARDED
        self.index.clear()
        self.idle.clear()

    @invariant()
    def agrees(self) -> None:
        audit(self.pool)
        assert self.pool.used == self.used() <= SLOTS
        assert self.pool.free == SLOTS - self.used()
        assert self.pool.pinned == sum(entry.units for entry in self.pins)
        assert self.told_evictions == self.evictions
        assert {entry.key: entry for entry in self.pool} == self.index
        assert [self.pool.get(key) for key in KEYS] == [*map(self.index.get, KEYS)], "is no use"
        assert self.told == {e.key for e in self.pool if e.state is EntryState.READY}
        for entry, state in self.state.items():
            assert entry.state is state
            assert entry.pins == self.pins.get(entry, 0)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstTheModel = PoolMachine.TestCase


def ready(pool: HostPool, key: bytes, n_slots: int = 1) -> Entry:
    """A READY entry without pins."""
    entry = pool.reserve(key, n_slots)
    assert entry is not None
    assert pool.publish(entry)
    pool.unpin(entry)
    return entry


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        bounds = (line.split()[0].split("-") for line in maps)
        return any(int(low, 16) <= address < int(high, 16) for low, high in bounds)


def test_a_key_given_late_replaces_the_entry_that_has_it() -> None:
    pool = HostPool(slots(3))
    old = pool.reserve(b"a key", 1)
    assert old is not None
    assert pool.end(old, is_filled=True)
    new = pool.reserve(None, 1)
    assert new is not None
    audit(pool)
    assert pool.get(b"a key") is old
    assert pool.publish(new, b"a key")
    assert pool.get(b"a key") is new
    assert old.state is EntryState.DISCARDED
    pool.unpin(new)
    audit(pool)
    assert (pool.used, pool.idle) == (1, 1)
    other = pool.reserve(None, 1)
    assert other is not None
    assert pool.publish(other, b"another key")
    assert (len(pool), pool.get(b"a key")) == (2, new)
    pool.unpin(other)
    audit(pool)
