# SPDX-License-Identifier: Apache-2.0
"""The process of one client of the benchmark, at any of its settings.

`python -m benchmarks.plane.worker CLIENT URL FD` answers the requests of `messages` that come
over the inherited socket FD, one after the other, until that is closed.
"""

from __future__ import annotations

import gc
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import redis

from benchmarks.plane.messages import Batch, Load, Measured, PrepareScan, Request, Setting, Store
from benchmarks.plane.peers import (
    CEILING,
    GLIDE,
    LMCACHE,
    OURS,
    REDIS_PY,
    Client,
    ScanningClient,
)
from benchmarks.plane.values import Arena, Values
from lmcache_redis.errors import RedisUnavailable


def make_client(name: str, url: str, setting: Setting) -> Client:
    """Connects a client. Imports what it needs, which for LMCache's is torch."""
    from benchmarks.plane import ceiling, clients

    if name == CEILING:
        return ceiling.MemoryCopy() if setting.how == "memcpy" else ceiling.BareSocket(setting)
    kinds: dict[str, Callable[[str, Setting], Client]] = {
        OURS: clients.OurClient,
        LMCACHE: clients.LMCacheClient,
        REDIS_PY: clients.RedisPyClient,
        GLIDE: clients.GlideClient,
    }
    return kinds[name](url, setting)


class Worker:
    """Clients by setting, connected when first used, and their memory."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url
        self._clients: dict[Setting, Client] = {}
        self._arena: Arena | None = None

    def answer(self, request: Request) -> Measured:
        client = self._client(request.setting)
        if isinstance(request, Store):
            client.prepare(request.name, self._values(request.setting, request.batch))
            fresh = request.fresh
            return _measure(lambda: client.store(fresh))
        if isinstance(request, Load):
            values = self._values(request.setting, request.batch)
            client.prepare(request.name, values)
            values.wipe()
            measured = _measure(client.load)
            if client.brings_values:
                values.check()
            else:
                values.stamp()
            return measured
        if not isinstance(client, ScanningClient):
            raise RedisUnavailable(f"{self._name} does not scan")
        if isinstance(request, PrepareScan):
            _put(self._url, client.prepare_scan(request.keys)[: request.present])
            return Measured()
        found: list[int] = []
        measured = _measure(lambda: found.append(client.scan_prepared()))
        if found != [request.present]:
            raise RedisUnavailable(f"a scan found {found[0]} of {request.present} keys")
        return measured

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _client(self, setting: Setting) -> Client:
        if setting not in self._clients:
            self._clients[setting] = make_client(self._name, self._url, setting)
        return self._clients[setting]

    def _values(self, setting: Setting, batch: Batch) -> Values:
        moved_bytes = batch.value_bytes * batch.items
        if self._arena is None or self._arena.moved_bytes < moved_bytes:
            self._arena = Arena(moved_bytes)
        slot_bytes = setting.slot_bytes if self._name == OURS else batch.value_bytes
        return self._arena.values(batch.value_bytes, batch.items, slot_bytes)


def _measure(work: Callable[[], object]) -> Measured:
    """Times the work, and the CPU time of the whole process meanwhile."""
    cpu_before_s = _cpu_s()
    started_s = time.perf_counter()
    work()
    elapsed_s = time.perf_counter() - started_s
    return Measured(elapsed_s, _cpu_s() - cpu_before_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _put(url: str, keys: Sequence[bytes]) -> None:
    """Small values under these keys."""
    with redis.Redis.from_url(url, protocol=2) as client:
        if keys:
            client.mset(dict.fromkeys(keys, b"x"))


def main(arguments: Sequence[str]) -> None:
    name, url, descriptor = arguments
    decoder = msgspec.json.Decoder(Request)
    worker = Worker(name, url)
    # As an agent does: the collector need not scan imported modules again.
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rwb") as stream:
        for line in stream:
            stream.write(msgspec.json.encode(worker.answer(decoder.decode(line))) + b"\n")
            stream.flush()
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
