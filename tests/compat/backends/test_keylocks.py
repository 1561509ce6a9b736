"""Locks of keys: shared by readers, exclusive to writers, granted in order."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future

from lmcache_redis.compat.backends.keylocks import KeyLocks
from tests.compat.backends.redis_tiers import wait_until


def soon() -> float:
    return time.monotonic() + 0.05


def test_readers_together_and_writers_alone() -> None:
    locks: KeyLocks[str] = KeyLocks()
    assert locks.acquire("a", soon(), exclusive=False)
    assert locks.acquire("a", soon(), exclusive=False)
    assert not locks.acquire("a", soon(), exclusive=True)
    assert locks.acquire("b", soon(), exclusive=True)
    locks.release("a")
    assert not locks.acquire("a", 0.0, exclusive=True)
    locks.release("a")
    assert locks.acquire("a", 0.0, exclusive=True)
    assert not locks.acquire("a", 0.0, exclusive=False)
    locks.release("a")
    locks.release("b")
    assert not locks._locks


def test_a_writer_that_waits_no_longer_lets_readers_pass() -> None:
    locks: KeyLocks[str] = KeyLocks()
    assert locks.acquire("a", soon(), exclusive=False)
    writer = threading.Thread(
        target=lambda: locks.acquire("a", time.monotonic() + 0.2, exclusive=True)
    )
    writer.start()
    wait_until(lambda: locks._locks["a"].waiting)
    assert not locks.acquire("a", 0.0, exclusive=False), "not before the writer"
    assert locks.acquire("a", time.monotonic() + 5, exclusive=False)
    writer.join()
    locks.release("a")
    locks.release("a")
    assert not locks._locks


def test_requests_are_granted_in_order() -> None:
    locks: KeyLocks[str] = KeyLocks()
    granted: list[int] = []
    assert locks.acquire("a", soon(), exclusive=True)
    requests = [locks.request("a", exclusive=True) for _ in range(50)]
    for number, request in enumerate(requests):

        def hold(_: Future[None], number: int = number) -> None:
            granted.append(number)
            locks.release("a")

        if number == 7:
            assert request.cancel()
        else:
            request.add_done_callback(hold)
    assert granted == []
    locks.release("a")
    assert granted == [number for number in range(50) if number != 7]
    assert not requests[8].cancel()
    assert not locks._locks


def test_threads_never_meet() -> None:
    locks: KeyLocks[int] = KeyLocks()
    counting = threading.Lock()
    inside = {key: [0, 0] for key in range(3)}
    failures: list[tuple[int, int]] = []
    stop_at = time.monotonic() + 0.5

    def work(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < stop_at:
            key, exclusive = choose.randrange(3), choose.random() < 0.4
            timeout_s = choose.choice([0.0, 0.001, 1.0])
            if not locks.acquire(key, time.monotonic() + timeout_s, exclusive=exclusive):
                continue
            with counting:
                inside[key][exclusive] += 1
                readers, writers = inside[key]
            if writers > 1 or (writers and readers):
                failures.append((readers, writers))
            time.sleep(0)
            with counting:
                inside[key][exclusive] -= 1
            locks.release(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failures
    assert not locks._locks
