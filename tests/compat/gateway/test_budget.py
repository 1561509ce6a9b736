"""The budget: shares of whole payloads, shares that grow, in turn."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from lmcache_redis.compat.gateway.budget import Budget, Share

GRAIN = 4096


def test_a_share_is_whole_grains() -> None:
    budget = Budget(8 * GRAIN + 4095, GRAIN)
    assert budget.grain_count == 8
    share = budget.try_take(2 * GRAIN + 1)
    assert share is not None
    assert (share.nbytes, budget.used_grains) == (2 * GRAIN + 1, 3)
    assert budget.try_take(5 * GRAIN + 1) is None
    share.release()
    share.release()
    assert budget.used_grains == 0
    nothing = budget.try_take(0)
    assert nothing is not None
    assert budget.used_grains == 0


def test_payloads_that_wait_are_served_in_turn() -> None:
    async def scenario() -> None:
        budget = Budget(4 * GRAIN, GRAIN)
        first = await budget.take(3 * GRAIN)
        large = asyncio.ensure_future(budget.take(4 * GRAIN))
        small = asyncio.ensure_future(budget.take(1))
        given_up = asyncio.ensure_future(budget.take(1))
        await asyncio.sleep(0)
        assert budget.try_take(1) is None, "one grain is free, but others wait"
        given_up.cancel()
        first.release()
        share = await large
        assert not small.done()
        share.release()
        (await small).release()
        assert budget.used_grains == 0
        assert budget.try_take(1) is not None

    asyncio.run(scenario())


def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        budget = Budget(4 * GRAIN, GRAIN)
        first = await budget.take(3 * GRAIN)
        large = asyncio.ensure_future(budget.take(4 * GRAIN))
        small = asyncio.ensure_future(budget.take(1))
        await asyncio.sleep(0)
        large.cancel()
        share = await asyncio.wait_for(small, 5)
        # Cancelled in the moment in which its turn has come.
        late = asyncio.ensure_future(budget.take(GRAIN))
        last = asyncio.ensure_future(budget.take(4 * GRAIN))
        await asyncio.sleep(0)
        share.release()
        first.release()
        late.cancel()
        (await asyncio.wait_for(last, 5)).release()
        with pytest.raises(asyncio.CancelledError):
            (await late).release()
        assert budget.used_grains == 0

    asyncio.run(scenario())


def test_a_payload_gets_as_much_again_as_it_has() -> None:
    budget = Budget(64 * GRAIN, GRAIN, 16 * GRAIN)
    share = budget.empty()
    rest, granted = 11 * GRAIN + 5, []
    while rest:
        granted.append(share.try_extend(rest))
        rest -= granted[-1]
    assert granted == [GRAIN, GRAIN, 2 * GRAIN, 4 * GRAIN, 3 * GRAIN + 5]
    assert share.nbytes == 11 * GRAIN + 5
    assert budget.used_grains == 12
    share.release()
    assert budget.used_grains == 0


def test_parts_leave_room_for_the_largest_payload() -> None:
    async def scenario() -> None:
        budget = Budget(20 * GRAIN, GRAIN, 16 * GRAIN)
        parts = [budget.empty() for _ in range(8)]
        assert [bool(part.try_extend(16 * GRAIN)) for part in parts] == [True] * 4 + [False] * 4
        waiting = [asyncio.ensure_future(part.extend(15 * GRAIN)) for part in parts[:4]]
        await asyncio.sleep(0)
        assert [each.done() for each in waiting] == [True, False, False, False]
        assert budget.is_short
        assert parts[4].try_extend(1) == 0, "one grain is free, but others wait"
        for number in range(4):
            assert await asyncio.wait_for(waiting[number], 5) == 15 * GRAIN
            assert parts[number].nbytes == 16 * GRAIN
            parts[number].release()
        assert not budget.is_short
        assert budget.used_grains == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_a_payload_that_has_a_part_gets_the_rest_in_the_end(seed: int) -> None:
    """Far more payloads at a time than fit, received in turns of any length."""

    async def receive(budget: Budget, number: int) -> None:
        choose = random.Random(seed * 100 + number)
        for _ in range(10):
            share, nbytes = budget.empty(), choose.randrange(1, 16 * GRAIN + 1)
            rest = nbytes
            while rest:
                granted = await share.extend(rest)
                assert 0 < granted <= rest
                rest -= granted
                for _ in range(choose.randrange(3)):
                    await asyncio.sleep(0)
            assert share.nbytes == nbytes
            assert budget.used_grains <= budget.grain_count
            share.release()

    async def scenario() -> None:
        budget = Budget(24 * GRAIN, GRAIN, 16 * GRAIN)
        await asyncio.wait_for(asyncio.gather(*(receive(budget, n) for n in range(50))), 20)
        assert budget.used_grains == 0

    asyncio.run(scenario())


def test_threads_take_what_is_free_and_never_more() -> None:
    budget = Budget(64 * GRAIN, GRAIN)
    taken: list[Share] = []

    def work() -> None:
        while (share := budget.try_take(GRAIN)) is not None:
            taken.append(share)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == budget.used_grains == 64
    for share in taken:
        share.release()
    assert budget.used_grains == 0
