# SPDX-License-Identifier: Apache-2.0
"""Our L2 adapter beside LMCache's own two for Redis, in its interface, on the same server.

Each round takes the adapters in turn, in another order: a first store, a lookup, a load. Objects
are in memory of the process, as they are in LMCache's server. `valkey` takes part where
valkey-glide and what LMCache imports beside it are installed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lmcache_l2 import (
    PLUGIN,
    L2Caller,
    create_adapter,
    import_lmcache,
    layouts_of,
    memory_object,
)
from benchmarks.servers import RedisProcess, ServerFailed, wait_for

_LAYERS = 2 * 32
_HIDDEN = 128


def run(rounds: int, sizes: Sequence[int], moved_bytes: int) -> list[dict[str, Any]]:
    """One row per size and adapter: medians in GB/s, of lookups in ms, and ratios to `resp`."""
    import_lmcache()
    import redis

    with tempfile.TemporaryDirectory() as directory, RedisProcess(Path(directory)) as server:
        client = redis.Redis.from_url(server.url)
        callers = {}
        for name, spec in _specs(server).items():
            try:
                callers[name] = L2Caller(create_adapter(spec))
            except ImportError as error:  # noqa: PERF203
                print(f"bench: {name} is left out: {error}")
        ours = callers["ours"].adapter
        wait_for(lambda: ours.report_status()["is_healthy"], "Redis")
        rows = []
        try:
            for size in sizes:
                count = max(4, moved_bytes // size)
                rows += _measured(callers, client, size, count, rounds)
        finally:
            for caller in callers.values():
                caller.adapter.close()
    return rows


def _specs(server: RedisProcess) -> dict[str, dict[str, Any]]:
    return {
        "ours": {**PLUGIN, "adapter_params": {"url": server.url}},
        "resp": {"type": "resp", "host": "127.0.0.1", "port": server.port},
        "valkey": {"type": "valkey", "startup_nodes": f"127.0.0.1:{server.port}"},
    }


def _measured(
    callers: dict[str, L2Caller], client: Any, size: int, count: int, rounds: int
) -> list[dict[str, Any]]:
    from lmcache.v1.distributed.api import ObjectKey

    shape = (_LAYERS, size // (_LAYERS * _HIDDEN * 2), _HIDDEN)
    stored = [memory_object(shape, fill=1 + n % 255) for n in range(count)]
    loaded = [memory_object(shape) for _ in range(count)]
    layouts = layouts_of(stored[0])
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in callers}
    for number in range(rounds + 1):
        names = list(callers)[:: 1 if number % 2 else -1]
        for name in names:
            caller = callers[name]
            client.flushall()
            keys = [ObjectKey(b"%d/%d" % (number, n), f"org/{name}", 1) for n in range(count)]
            for each in loaded:
                each.raw_data.zero_()
            took = (
                _seconds(lambda: caller.store(keys, stored).is_successful()),  # noqa: B023
                _seconds(lambda: all(caller.lookup(keys, layouts))),  # noqa: B023
                _seconds(lambda: all(caller.load(keys, loaded))),  # noqa: B023
            )
            if any(not a.raw_data.equal(b.raw_data) for a, b in zip(stored, loaded, strict=True)):
                raise ServerFailed(f"{name} has loaded other bytes than it stored")
            if number:  # the first round warms connections and memory
                times[name].append(took)
    return [_row(name, times, size, count) for name in callers]


def _seconds(call: Callable[[], bool]) -> float:
    started_s = time.perf_counter()
    is_done = call()
    took_s = time.perf_counter() - started_s
    if not is_done:
        raise ServerFailed("an L2 adapter failed a task")
    return took_s


def _row(
    name: str, times: dict[str, list[tuple[float, float, float]]], size: int, count: int
) -> dict[str, Any]:
    store, lookup, load = map(statistics.median, zip(*times[name], strict=True))
    base = list(map(statistics.median, zip(*times["resp"], strict=True)))
    total = size * count / 1e9
    return {
        "object_kib": size >> 10,
        "objects": count,
        "adapter": name,
        "store_gb_s": round(total / store, 2),
        "load_gb_s": round(total / load, 2),
        "lookup_ms": round(lookup * 1e3, 2),
        "store_ratio": round(base[0] / store, 2),
        "load_ratio": round(base[2] / load, 2),
        "lookup_ratio": round(base[1] / lookup, 2),
    }
