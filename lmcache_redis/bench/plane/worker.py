"""A process that works for the benchmark with one client, at any of its settings.

`python -m lmcache_redis.bench.plane.worker CLIENT URL FD` answers the requests of `messages`
that come over the inherited socket FD, one after the other, until that is closed.
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

from lmcache_redis.bench.plane.messages import (
    Load,
    Measured,
    Prepare,
    PrepareScan,
    Request,
    Scan,
    Setting,
    Store,
)
from lmcache_redis.bench.plane.peers import OURS, make_client
from lmcache_redis.bench.plane.peers.base import Client, ScanningClient
from lmcache_redis.bench.plane.values import Arena, Values
from lmcache_redis.errors import RedisUnavailable


class Worker:
    """Clients by setting, connected when first needed, and their memory."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url
        self._clients: dict[Setting, Client] = {}
        self._arena: Arena | None = None
        self._shape = (0, 0)

    def answer(self, request: Request) -> Measured:
        if isinstance(request, Prepare):
            return self._prepare(request)
        client = self._client(request.setting)
        if isinstance(request, Store):
            client.prepare(request.name, self._values(request.setting))
            fresh = request.fresh
            return measure(lambda: client.store(fresh))
        if isinstance(request, Load):
            values = self._values(request.setting)
            client.prepare(request.name, values)
            values.wipe()
            measured = measure(client.load)
            if client.brings_values:
                values.check()
            else:
                values.stamp()
            return measured
        if not isinstance(client, ScanningClient):
            raise RedisUnavailable(f"{self._name} does not scan")
        if isinstance(request, PrepareScan):
            put_values(self._url, client.prepare_scan(request.keys)[: request.present])
            return Measured()
        return self._scan(client, request)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _prepare(self, request: Prepare) -> Measured:
        moved_bytes = request.value_bytes * request.items
        if self._arena is None or self._arena.moved_bytes < moved_bytes:
            self._arena = Arena(moved_bytes)
        self._shape = (request.value_bytes, request.items)
        return Measured()

    def _client(self, setting: Setting) -> Client:
        if setting not in self._clients:
            self._clients[setting] = make_client(self._name, self._url, setting)
        return self._clients[setting]

    def _values(self, setting: Setting) -> Values:
        if self._arena is None:
            raise RuntimeError("values are moved after a Prepare")
        slot_bytes = setting.slot_bytes if self._name == OURS else self._shape[0]
        return self._arena.values(*self._shape, slot_bytes)

    @staticmethod
    def _scan(client: ScanningClient, request: Scan) -> Measured:
        found: list[int] = []
        measured = measure(lambda: found.append(client.scan()))
        if found != [request.present]:
            raise RedisUnavailable(f"a scan found {found[0]} of {request.present} keys")
        return measured


def measure(work: Callable[[], object]) -> Measured:
    """Runs the work and gives its time, and the CPU time of the whole process meanwhile."""
    cpu_before_s = _cpu_s()
    started_s = time.perf_counter()
    work()
    elapsed_s = time.perf_counter() - started_s
    return Measured(elapsed_s, _cpu_s() - cpu_before_s)


def put_values(url: str, keys: Sequence[bytes]) -> None:
    """Small values under these keys."""
    with redis.Redis.from_url(url, protocol=2) as client:
        if keys:
            client.mset(dict.fromkeys(keys, b"x"))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str]) -> None:
    name, url, descriptor = arguments
    decoder = msgspec.json.Decoder(Request)
    worker = Worker(name, url)
    # As agents do: imports stay, and need not be looked through again.
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rwb") as stream:
        for line in stream:
            stream.write(msgspec.json.encode(worker.answer(decoder.decode(line))) + b"\n")
            stream.flush()
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
