# SPDX-License-Identifier: Apache-2.0
"""Batched calls: order, windows, abandoned batches."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.errors import FormatError
from lmcache_redis.objects import backend as backends
from lmcache_redis.resp import RedisOptions
from tests.objects.redis_tiers import SLOT, plane_of, tier, wait_until
from tests.objects.samples import key_of, same, tensor_of
from tests.resp.proxy import Proxy, Stall
from tests.servers import RedisServer


def chunks(count: int, nbytes: int = 1000) -> list[tuple[ObjectKey, torch.Tensor]]:
    return [(key_of(number), tensor_of(number, (nbytes,))) for number in range(count)]


def one_by_one(proxy: Proxy) -> RedisOptions:
    """One connection for GETs, so that the proxy sees them in order."""
    return RedisOptions(proxy.url, connections=1)


def test_the_first_is_there_before_the_last_was_sent(server: RedisServer) -> None:
    pairs = chunks(6)
    with (
        Proxy(server.port) as proxy,
        tier(one_by_one(proxy), counts_descriptors=False) as backend,
    ):
        assert backend.batched_put(pairs) == 6
        # One GET per chunk; that of the last chunk is never answered.
        proxy.for_gets.extend([None] * 5 + [Stall(0)])
        found = backend.batched_get([key for key, _ in pairs])
        assert same(next(found), pairs[0][1])
        wait_until(lambda: proxy.gets == 6, "the last is asked for while the first is used")
        for _, expected in pairs[1:5]:
            assert same(next(found), expected)
        assert next(found) is None
        with pytest.raises(StopIteration):
            next(found)


@pytest.mark.parametrize(
    ("window", "most"),
    [({"WINDOW_CHUNKS": 4}, 4), ({"WINDOW_BYTES": 4500}, 4), ({"WINDOW_BYTES": 1}, 1)],
)
def test_no_more_is_read_ahead_than_the_window(
    server: RedisServer, window: dict[str, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in window.items():
        monkeypatch.setattr(backends, name, value)
    pairs = chunks(12)
    taken: list[int] = []

    def keys() -> Iterator[ObjectKey]:
        for number, (key, _) in enumerate(pairs):
            taken.append(number)
            yield key

    with tier(server.url) as backend:
        assert backend.batched_put(iter(pairs)) == 12
        for number, tensor in enumerate(backend.batched_get(keys())):
            assert same(tensor, pairs[number][1])
            assert len(taken) <= number + most
    assert taken == list(range(12))


def test_a_consumer_may_put_and_remove_what_it_is_getting(server: RedisServer) -> None:
    pairs = chunks(8)
    with tier(server.url, deadline_s=20.0) as backend:
        assert backend.batched_put(pairs) == 8
        for number, tensor in enumerate(backend.batched_get([key for key, _ in pairs])):
            assert tensor is None or same(tensor, pairs[number][1])
            for key, chunk in pairs:
                assert backend.put(key, chunk)
            assert backend.remove(key_of((number + 3) % 8))


@pytest.mark.parametrize("how", ["closed", "forgotten", "never begun", "raised"])
def test_an_abandoned_batch_leaves_nothing(server: RedisServer, how: str) -> None:
    pairs = chunks(8, 50 * SLOT)
    with tier(server.url) as backend:
        assert backend.batched_put(pairs) == 8
        found = backend.batched_get([key for key, _ in pairs])
        if how != "never begun":
            first = next(found)
            assert first is not None
            memory = weakref.ref(first)
            del first
        if how == "closed":
            found.close()  # type: ignore[attr-defined]
        elif how == "raised":
            with pytest.raises(LookupError):
                found.throw(LookupError("of the consumer"))  # type: ignore[attr-defined]
        del found
        wait_until(lambda: not plane_of(backend)._jobs.transfers)
        wait_until(lambda: backend._objects.cache.pool.pinned == 0)
        if how != "never begun":
            wait_until(lambda: memory() is None)
        # The keys are unlocked again.
        assert all(backend.put(key, chunk) for key, chunk in pairs)


def test_abandoned_while_the_server_holds_back_the_rest(server: RedisServer) -> None:
    pairs = chunks(4)
    with (
        Proxy(server.port) as proxy,
        tier(one_by_one(proxy), counts_descriptors=False) as backend,
    ):
        assert backend.batched_put(pairs) == 4
        proxy.for_gets.extend([None, Stall(100), Stall(100), Stall(100)])
        found = backend.batched_get([key for key, _ in pairs])
        assert same(next(found), pairs[0][1])
        started = time.monotonic()
        found.close()  # type: ignore[attr-defined]
        assert time.monotonic() - started < 2.0, "a wait for what is not wanted"
        wait_until(lambda: not plane_of(backend)._jobs.transfers)
        proxy.for_gets.clear()
        assert same(backend.get(key_of(3)), pairs[3][1])


def test_an_error_among_puts_is_raised_at_the_end(server: RedisServer) -> None:
    good = chunks(3, 20 * SLOT)

    def pairs() -> Iterator[tuple[ObjectKey, torch.Tensor]]:
        yield from good
        yield key_of(9), torch.zeros(3, 0)

    with tier(server.url) as backend:
        with pytest.raises(FormatError):
            backend.batched_put(pairs())
        assert not plane_of(backend)._jobs.transfers
        for key, chunk in good:
            assert same(backend.get(key), chunk)
