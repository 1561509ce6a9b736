"""Slots: all at once, in turn, from any thread."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from lmcache_redis.gateway.slots import FreeRuns, Lease, SlotPool


def test_views_are_as_long_as_the_payload_and_hold_it() -> None:
    pool = SlotPool(8 * 4096, 4096)
    payload = random.Random(1).randbytes(2 * 4096 + 1)
    with pool.try_take(len(payload)) as lease:  # type: ignore[union-attr]
        (view,) = lease.views
        assert len(view) == len(payload)
        view[:] = payload
        assert b"".join(lease.views) == payload
        assert pool.used_slots == 3
    lease.release()
    assert pool.used_slots == 0
    with pool.try_take(0) as lease:  # type: ignore[union-attr]
        assert (lease.views, pool.used_slots) == ([], 0)
    pool.close()


def test_what_is_left_between_others_is_given_as_several_views() -> None:
    """Slots 1, 3, 4 and 6 of seven: the longest run first, and no byte of the others."""
    pool = SlotPool(7 * 4096 + 4095, 4096)
    leases = [pool.try_take(4096) for _ in range(7)]
    for number in (1, 3, 4, 6):
        leases[number].release()  # type: ignore[union-attr]
    kept = [leases[number] for number in (0, 2, 5)]
    for lease in kept:
        lease.views[0][:] = b"k" * 4096  # type: ignore[union-attr]
    split = pool.try_take(3 * 4096 + 5)
    assert split is not None
    assert [len(view) for view in split.views] == [8192, 4096, 5]
    for view in split.views:
        view[:] = b"s" * len(view)
    assert all(lease.views[0] == b"k" * 4096 for lease in kept)  # type: ignore[union-attr]
    assert pool.try_take(1) is None
    for lease in (*kept, split):
        lease.release()  # type: ignore[union-attr]
    whole = pool.try_take(7 * 4096)
    assert whole is not None
    assert [len(view) for view in whole.views] == [7 * 4096], "all neighbours again"
    pool.close()


def test_runs_against_a_set_of_free_slots() -> None:
    choose = random.Random(7)
    for count in (1, 9, 200):
        runs, free = FreeRuns(count), set(range(count))
        taken: list[range] = []
        for _ in range(2000):
            wanted = choose.randrange(1 + count // 2)
            if choose.random() < 0.5 and wanted <= runs.free:
                fits = any(set(range(n, n + wanted)) <= free for n in range(count))
                given = runs.take(wanted)
                assert sum(map(len, given)) == wanted
                assert len(given) <= 1 or not fits, "one run where one is long enough"
                for run in given:
                    assert set(run) <= free
                    free -= set(run)
                taken += given
            elif taken:
                run = taken.pop(choose.randrange(len(taken)))
                runs.give_back(run)
                free |= set(run)
            assert runs.free == len(free)
        for run in taken:
            runs.give_back(run)
        assert [*map(len, runs.take(count))] == [count]


def test_whoever_waits_is_served_in_turn() -> None:
    async def scenario() -> None:
        pool = SlotPool(4 * 4096, 4096)
        first = await pool.take(3 * 4096)
        large = asyncio.ensure_future(pool.take(4 * 4096))
        small = asyncio.ensure_future(pool.take(1))
        given_up = asyncio.ensure_future(pool.take(1))
        await asyncio.sleep(0)
        assert pool.try_take(1) is None, "one slot is free, but others wait"
        given_up.cancel()
        first.release()
        lease = await large
        assert not small.done()
        lease.release()
        (await small).release()
        assert pool.used_slots == 0
        assert pool.try_take(1) is not None
        pool.close()

    asyncio.run(scenario())


def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        pool = SlotPool(4 * 4096, 4096)
        first = await pool.take(3 * 4096)
        large = asyncio.ensure_future(pool.take(4 * 4096))
        small = asyncio.ensure_future(pool.take(1))
        await asyncio.sleep(0)
        large.cancel()
        lease = await asyncio.wait_for(small, 5)
        # Cancelled in the moment in which its turn has come.
        late = asyncio.ensure_future(pool.take(4096))
        last = asyncio.ensure_future(pool.take(4 * 4096))
        await asyncio.sleep(0)
        lease.release()
        first.release()
        late.cancel()
        (await asyncio.wait_for(last, 5)).release()
        with pytest.raises(asyncio.CancelledError):
            (await late).release()
        assert pool.used_slots == 0
        pool.close()

    asyncio.run(scenario())


def test_a_payload_gets_as_much_again_as_it_has() -> None:
    async def scenario() -> None:
        pool = SlotPool(64 * 4096, 4096, 16 * 4096)
        other = pool.empty()
        await other.extend(8 * 4096)
        lease = pool.empty()
        rest, gotten = 11 * 4096 + 5, []
        while rest:
            views = lease.try_extend(rest)
            gotten.append(sum(map(len, views)))
            rest -= gotten[-1]
        assert gotten == [4096, 4096, 2 * 4096, 4 * 4096, 3 * 4096 + 5]
        assert lease.nbytes == 11 * 4096 + 5
        (view,) = lease.views
        assert len(view) == lease.nbytes, "all neighbours"
        assert pool.used_slots == 13
        lease.release()
        other.release()
        assert pool.used_slots == 0
        pool.close()

    asyncio.run(scenario())


def test_parts_leave_room_for_the_largest_payload() -> None:
    async def scenario() -> None:
        pool = SlotPool(20 * 4096, 4096, 16 * 4096)
        parts = [pool.empty() for _ in range(8)]
        assert [bool(part.try_extend(16 * 4096)) for part in parts] == [True] * 4 + [False] * 4
        waiting = [asyncio.ensure_future(part.extend(15 * 4096)) for part in parts[:4]]
        await asyncio.sleep(0)
        assert [each.done() for each in waiting] == [True, False, False, False]
        assert pool.is_short
        assert parts[4].try_extend(1) == [], "one slot is free, but others wait"
        for number in range(4):
            assert sum(map(len, await asyncio.wait_for(waiting[number], 5))) == 15 * 4096
            assert parts[number].nbytes == 16 * 4096
            parts[number].release()
        assert not pool.is_short
        assert pool.used_slots == 0
        pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_whoever_has_a_part_gets_the_rest_in_the_end(seed: int) -> None:
    """Far more payloads at a time than there is room for, received in turns of any length."""

    async def receive(pool: SlotPool, number: int) -> None:
        choose = random.Random(seed * 100 + number)
        for _ in range(10):
            lease, rest = pool.empty(), choose.randrange(1, 16 * 4096 + 1)
            payload = bytes([number]) * rest
            while rest:
                for view in await lease.extend(rest):
                    view[:] = payload[: len(view)]
                    rest -= len(view)
                for _ in range(choose.randrange(3)):
                    await asyncio.sleep(0)
            assert b"".join(lease.views) == payload
            lease.release()

    async def scenario() -> None:
        pool = SlotPool(24 * 4096, 4096, 16 * 4096)
        await asyncio.wait_for(asyncio.gather(*(receive(pool, n) for n in range(50))), 20)
        assert pool.used_slots == 0
        pool.close()

    asyncio.run(scenario())


def test_threads_take_what_is_free_and_never_more() -> None:
    pool = SlotPool(64 * 4096, 4096)
    taken: list[Lease] = []

    def work() -> None:
        while (lease := pool.try_take(4096)) is not None:
            taken.append(lease)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == pool.used_slots == 64
    for lease in taken:
        lease.release()
    assert pool.used_slots == 0
    pool.close()
