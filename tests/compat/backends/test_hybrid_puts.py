"""Several puts into a hybrid: a batch overlaps, puts of one key do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.compat.backends.local import LMCLocalBackend
from lmcache_redis.errors import FormatError
from tests.compat.backends.contract import key_of, same, tensor_of
from tests.compat.backends.redis_tiers import wait_until
from tests.compat.backends.test_hybrid import ROOM, Hybrid


class SlowPuts(LMCLocalBackend):
    """Memory whose puts wait for `go_on`. most: the most puts in flight at once."""

    def __init__(self, limit_bytes: int = ROOM) -> None:
        super().__init__(limit_bytes)
        self.order: list[ObjectKey] = []
        self.inside = self.most = 0
        self.go_on = threading.Event()
        self._lock = threading.Lock()

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        with self._lock:
            self.order.append(key)
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            assert self.go_on.wait(10)
            return super().put_bytes(key, metadata, payload, blocking)
        finally:
            with self._lock:
                self.inside -= 1


def test_puts_of_a_batch_overlap() -> None:
    """None of them returns before four are in flight."""
    lower = SlowPuts()
    hybrid = Hybrid(LMCLocalBackend(ROOM), lower, read_ahead=4)
    pairs = [(key_of(number), tensor_of(number, (100 + number,))) for number in range(10)]
    stored: list[int] = []
    hybrid.begin(lambda: stored.append(hybrid.backend.batched_put(iter(pairs))))
    wait_until(lambda: lower.inside == 4, "four puts at once")
    assert stored == []
    lower.go_on.set()
    hybrid.join()
    assert stored == [10]
    assert lower.most == 4
    assert all(same(lower.get(key), chunk) for key, chunk in pairs)
    assert not [t for t in threading.enumerate() if t.name.startswith("lmcr-hybrid")]


def test_of_one_key_in_a_batch_the_last_is_there() -> None:
    for blocking in (True, False):
        hybrid = Hybrid(LMCLocalBackend(ROOM), LMCLocalBackend(ROOM), read_ahead=8)
        last: dict[ObjectKey, torch.Tensor] = {}
        pairs = [(key_of(n % 3), tensor_of(n, (20_000 - 500 * n,))) for n in range(30)]
        last.update(pairs)
        assert hybrid.backend.batched_put(pairs, blocking) == 30
        for key, chunk in last.items():
            assert same(hybrid.upper.get(key), chunk)
            assert same(hybrid.lower.get(key), chunk)


def test_an_error_in_a_batch_comes_when_what_was_begun_is_done() -> None:
    lower = SlowPuts()
    hybrid = Hybrid(LMCLocalBackend(ROOM), lower)
    chunks = {n: tensor_of(n, (100,)) for n in range(3)}

    def some() -> Iterator[tuple[ObjectKey, torch.Tensor]]:
        yield key_of(0), chunks[0]
        yield key_of(1), chunks[1]
        lower.go_on.set()
        raise LookupError("of the caller")

    with pytest.raises(LookupError, match="of the caller"):
        hybrid.backend.batched_put(some())
    assert not lower.inside
    assert sorted(lower.list()) == [key_of(0), key_of(1)]
    with pytest.raises(FormatError):
        hybrid.backend.batched_put([(key_of(2), chunks[2]), (key_of(3), torch.zeros(()))])
    assert sorted(lower.list()) == [key_of(0), key_of(1), key_of(2)]


def test_a_count_of_what_no_tier_took() -> None:
    hybrid = Hybrid(LMCLocalBackend(1000), LMCLocalBackend(1000))
    sizes = [500, 5000, 400, 5000, 5000]
    pairs = [(key_of(n), tensor_of(n, (size,))) for n, size in enumerate(sizes)]
    assert hybrid.backend.batched_put(pairs) == 2


def test_a_put_that_does_not_get_the_lock_changes_nothing() -> None:
    """Nor does a removal: the put before it hangs in a tier."""
    lower = SlowPuts()
    hybrid = Hybrid(LMCLocalBackend(ROOM), lower, wait_s=0.1)
    first, second = tensor_of(1, (100,)), tensor_of(2, (200,))
    hybrid.begin(lambda: hybrid.backend.put(key_of(1), first))
    wait_until(lambda: lower.inside)
    assert not hybrid.backend.put(key_of(1), second)
    assert not hybrid.backend.put(key_of(1), second, blocking=False)
    assert not hybrid.backend.remove(key_of(1))
    assert hybrid.backend.batched_put([(key_of(1), second)]) == 0
    assert lower.order == [key_of(1)]
    assert same(hybrid.backend.get(key_of(1)), first)
    lower.go_on.set()
    hybrid.join()
    assert same(lower.get(key_of(1)), first)
    assert hybrid.backend.put(key_of(1), second)
    assert same(lower.get(key_of(1)), second)
    assert not hybrid.backend._locks._locks
