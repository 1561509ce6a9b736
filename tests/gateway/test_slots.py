"""Slots: all at once, in turn, from any thread."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from lmcache_redis.gateway.slots import Lease, SlotPool


def test_views_are_as_long_as_the_payload_and_hold_it() -> None:
    pool = SlotPool(8 * 4096, 4096)
    payload = random.Random(1).randbytes(2 * 4096 + 1)
    with pool.try_take(len(payload)) as lease:  # type: ignore[union-attr]
        assert [len(view) for view in lease.views] == [4096, 4096, 1]
        for number, view in enumerate(lease.views):
            view[:] = payload[number * 4096 :][: len(view)]
        assert b"".join(lease.views) == payload
        assert pool.used_slots == 3
    lease.release()
    assert pool.used_slots == 0
    with pool.try_take(0) as lease:  # type: ignore[union-attr]
        assert (lease.views, pool.used_slots) == ([], 0)
    pool.close()


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
