"""Turns at a key: readers together, writers alone, everybody in order, nobody forgotten."""

from __future__ import annotations

import random
import threading
import time

from lmcache_redis.backends.turns import Turns
from tests.backends.redis_tiers import wait_until


def soon() -> float:
    return time.monotonic() + 0.05


def test_readers_together_and_writers_alone() -> None:
    turns: Turns[str] = Turns()
    assert turns.enter("a", soon(), exclusive=False)
    assert turns.enter("a", soon(), exclusive=False)
    assert not turns.enter("a", soon(), exclusive=True)
    assert turns.enter("b", soon(), exclusive=True)
    turns.leave("a")
    assert not turns.try_enter("a", exclusive=True)
    turns.leave("a")
    assert turns.try_enter("a", exclusive=True)
    assert not turns.try_enter("a", exclusive=False)
    turns.leave("a")
    turns.leave("b")
    assert not turns._lines


def test_a_writer_that_waits_no_longer_lets_readers_pass() -> None:
    turns: Turns[str] = Turns()
    assert turns.enter("a", None, exclusive=False)
    writer = threading.Thread(
        target=lambda: turns.enter("a", time.monotonic() + 0.2, exclusive=True)
    )
    writer.start()
    wait_until(lambda: turns._lines["a"].waiting)
    assert not turns.try_enter("a", exclusive=False), "not before the writer"
    assert turns.enter("a", time.monotonic() + 5, exclusive=False)
    writer.join()
    turns.leave("a")
    turns.leave("a")
    assert not turns._lines


def test_later_turns_come_in_order_and_may_be_given_back() -> None:
    turns: Turns[str] = Turns()
    started: list[int] = []
    assert turns.enter("a", None, exclusive=True)

    def start(number: int) -> bool:
        started.append(number)
        return number == 3000

    # More that give their turn back than a stack is deep.
    for number in range(3001):
        turns.enter_later("a", lambda number=number: start(number))  # type: ignore[misc]
    assert started == []
    turns.leave("a")
    assert started == list(range(3001))
    assert not turns.try_enter("a", exclusive=False)
    turns.leave("a")
    turns.enter_later("a", lambda: start(-1))
    assert started[-1] == -1
    assert not turns._lines


def test_threads_never_meet() -> None:
    turns: Turns[int] = Turns()
    counting = threading.Lock()
    inside = {key: [0, 0] for key in range(3)}
    failures: list[tuple[int, int]] = []
    stop_at = time.monotonic() + 0.5

    def work(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < stop_at:
            key, exclusive = choose.randrange(3), choose.random() < 0.4
            timeout_s = choose.choice([0.0, 0.001, 1.0])
            if not turns.enter(key, time.monotonic() + timeout_s, exclusive=exclusive):
                continue
            with counting:
                inside[key][exclusive] += 1
                readers, writers = inside[key]
            if writers > 1 or (writers and readers):
                failures.append((readers, writers))
            time.sleep(0)
            with counting:
                inside[key][exclusive] -= 1
            turns.leave(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failures
    assert not turns._lines
