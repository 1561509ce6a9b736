# SPDX-License-Identifier: Apache-2.0
"""The door between LMCache's classes and a real Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from benchmarks.lmcache_l2 import PLUGIN, L2Caller, create_adapter, layouts_of, memory_object
from tests.servers import RedisServer, wait_until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.usefixtures("lmcache"),
    pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning"),
]

SHAPE = (2, 4, 64, 256)
BYTES = 2 * 4 * 64 * 256 * 2
# Above what an unreachable server may cost a caller, far below every deadline.
AT_ONCE_S = 0.5

Open = Callable[..., L2Caller]


@pytest.fixture
def open_door(redis_server: RedisServer) -> Iterator[Open]:
    opened: list[Any] = []

    def make(**settings: Any) -> L2Caller:
        params = {"url": redis_server.unix_url, "slot_bytes": 65536, **settings}
        adapter = create_adapter({**PLUGIN, "adapter_params": params})
        opened.append(adapter)
        wait_until(lambda: adapter.report_status()["is_healthy"], "Redis")
        return L2Caller(adapter)

    yield make
    for adapter in opened:
        adapter.close()


@pytest.fixture
def door(open_door: Open) -> L2Caller:
    return open_door()


def keys(*numbers: int, **more: Any) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    given = {"model_name": "org/model", "kv_rank": 0x01000100, **more}
    return [ObjectKey(number.to_bytes(32, "big"), **given) for number in numbers]


def filled(*numbers: int, dtype: str = "bfloat16", shape: Sequence[int] = SHAPE) -> list[Any]:
    return [memory_object(shape, dtype, number) for number in numbers]


def content(some: Any) -> set[int]:
    return {*bytes(memoryview(some.byte_array).cast("B"))}


def layouts(**more: Any) -> dict[int, Any]:
    """As a lookup of such objects gives them."""
    return layouts_of(filled(0, **more)[0])


def test_stored_objects_are_found_and_loaded(door: L2Caller, open_door: Open) -> None:
    result = door.store(keys(1, 2, 3), filled(1, 2, 3))
    assert (result.is_successful(), result.bytes_transferred()) == (True, 3 * BYTES)
    other = open_door()  # has seen nothing but the lookup's layout
    assert other.lookup(keys(1, 9, 3), layouts()) == [True, False, True]
    into = filled(0, 0, 0)
    assert other.load(keys(1, 9, 3), into) == [True, False, True]
    assert [content(each) for each in into[::2]] == [{1}, {3}]
    task = other.adapter.submit_lookup_and_lock_task(keys(1), layouts())
    wait_until(lambda: other.adapter.query_lookup_and_lock_result(task) is not None)
    assert other.adapter.query_lookup_and_lock_result(task) is None, "a result is told once"


def test_whatever_decides_the_bytes_makes_a_miss(door: L2Caller, open_door: Open) -> None:
    door.store(keys(1), filled(1))
    for other in ({"dtype": "float16"}, {"shape": (*SHAPE[:3], 255)}, {"shape": SHAPE[1:]}):
        assert door.lookup(keys(1), layouts(**other)) == [False], other
        # A load without a lookup is one as well.
        assert door.load(keys(1), filled(0, **other)) == [False], other
    for other in ({"kv_rank": 1}, {"model_name": "org/x"}, {"cache_salt": "x"}):
        assert door.lookup(keys(1, **other), layouts()) == [False], other
    assert door.lookup(keys(1, object_group_id=1), layouts_of(filled(0)[0], 1)) == [False]
    assert open_door(weights_id="v2").lookup(keys(1), layouts()) == [False]
    assert open_door(key_prefix="x:").lookup(keys(1), layouts()) == [False]
    assert door.lookup(keys(1), layouts()) == [True]


def test_a_lookup_needs_a_layout_once(door: L2Caller, open_door: Open) -> None:
    door.store(keys(1), filled(1))
    assert door.lookup(keys(1), {}) == [True]
    other = open_door()
    assert other.lookup(keys(1), {}) == [False]
    assert other.lookup(keys(1), layouts()) == [True]


def test_a_dead_redis_is_misses_at_once(door: L2Caller, redis_server: RedisServer) -> None:
    door.store(keys(1), filled(1))
    redis_server.kill()
    wait_until(lambda: not door.adapter.report_status()["is_healthy"], "the loss to be seen")
    started_s = time.monotonic()
    assert door.lookup(keys(1), layouts()) == [False]
    assert door.load(keys(1), filled(0)) == [False]
    assert not door.store(keys(2), filled(2)).is_successful()
    door.adapter.delete(keys(1))
    assert time.monotonic() - started_s < AT_ONCE_S
    assert door.adapter.get_usage().total_bytes_used == BYTES, "nothing was deleted"
    assert door.adapter.report_status()["reason"]
    redis_server.start()
    wait_until(lambda: door.adapter.report_status()["is_healthy"], "the return to be seen")
    assert door.lookup(keys(1), layouts()) == [False]
    assert door.store(keys(1), filled(1)).is_successful()
    assert door.load(keys(1), filled(0)) == [True]


def test_a_stopped_redis_blocks_no_caller(open_door: Open, redis_server: RedisServer) -> None:
    """No task ends at once, so a call that waited for its own would find it ended."""
    door = open_door(timeout_s=50.0)
    objects = filled(0), filled(2)  # they belong to the door until their tasks have ended
    door.store(keys(1), filled(1))
    redis_server.stop()
    load = door.adapter.submit_load_task(keys(1), objects[0])
    store = door.adapter.submit_store_task(keys(2), objects[1])
    lookup = door.adapter.submit_lookup_and_lock_task(keys(1), layouts())
    assert not door.adapter.pop_completed_store_tasks(), "a controller was blocked"
    assert door.adapter.query_load_result(load) is None
    assert door.adapter.query_lookup_and_lock_result(lookup) is None
    stores: dict[int, Any] = {}
    results: list[Any] = []

    def have_ended() -> bool:
        stores.update(door.adapter.pop_completed_store_tasks())
        for take, task in (
            (door.adapter.query_load_result, load),
            (door.adapter.query_lookup_and_lock_result, lookup),
        ):
            if (result := take(task)) is not None:
                results.append(result)
        return store in stores and len(results) == 2

    wait_until(have_ended, "the deadlines")
    redis_server.cont()
    assert not stores[store].is_successful()
    assert not any(each.test(0) for each in results)


def test_usage_is_charged_once_and_given_back(door: L2Caller) -> None:
    told: list[tuple[str, list[int]]] = []

    class Listener:
        def on_l2_keys_stored(self, keys: Any, sizes: list[int]) -> None:
            told.append(("stored", sizes))

        def on_l2_keys_accessed(self, keys: Any) -> None:
            told.append(("accessed", [len(keys)]))

        def on_l2_keys_deleted(self, keys: Any) -> None:
            told.append(("deleted", [len(keys)]))

    door.adapter.register_listener(Listener())
    door.store(keys(1, 2, cache_salt="a"), filled(1, 2))
    again = door.store(keys(2, 3, cache_salt="a"), filled(2, 3))
    assert again.bytes_transferred() == BYTES, "what is there is not written again"
    assert told == [("stored", [BYTES, BYTES]), ("stored", [0, BYTES])]
    usage = door.adapter.get_usage()
    assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt)) == (
        3 * BYTES,
        {"a": 3 * BYTES},
    )
    told.clear()
    door.load(keys(1, 9, cache_salt="a"), filled(0, 0))
    door.adapter.submit_touch(keys(2, cache_salt="a"))
    # What Redis has evicted is given back as well: LMCache would ask for it for ever.
    door.adapter.delete(keys(1, 2, 3, 9, cache_salt="a"))
    assert told == [("accessed", [1]), ("accessed", [1]), ("deleted", [4])]
    assert door.adapter.get_usage().total_bytes_used == 0
    assert door.lookup(keys(1, 2, 3, cache_salt="a"), layouts()) == [False] * 3


def test_objects_of_a_serde_are_refused_with_a_reason(
    door: L2Caller, caplog: pytest.LogCaptureFixture
) -> None:
    assert door.lookup(keys(1, 2), layouts()) == [False, False]
    encoded = filled(1, dtype="uint8", shape=(BYTES // 2 + 64,))
    with caplog.at_level(logging.WARNING):
        assert not door.store(keys(1), encoded).is_successful()
        assert not door.store(keys(2), encoded).is_successful()
    assert [record.getMessage().count("serde is on") for record in caplog.records] == [1]
    assert door.load(keys(1), encoded) == [False]


def test_objects_without_a_name_are_refused(door: L2Caller) -> None:
    many = filled(0, dtype="uint8", shape=(1,) * 9)
    assert not door.store(keys(1), many).is_successful()
    assert door.lookup(keys(1), layouts_of(many[0])) == [False]
    unknown = filled(0, dtype="complex64", shape=(4,))
    assert not door.store(keys(1), unknown).is_successful()
    assert door.lookup(keys(1), layouts_of(unknown[0])) == [False]
    assert door.store(keys(1), filled(1)).is_successful()


def test_charges_are_forgotten_beyond_a_bound(
    door: L2Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_redis.integrations.lmcache._KEPT_CHARGES", 3)
    small = memory_object((2, 8))
    for number in range(4):
        door.store(keys(number), [small])
    assert len(door.adapter._charges._sizes) == 3
    assert door.lookup(keys(*range(4)), layouts_of(small)) == [True] * 4
