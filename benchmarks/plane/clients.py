# SPDX-License-Identifier: Apache-2.0
"""Our client and three peers. A peer stores each chunk as one value, as LMCache does."""

from __future__ import annotations

import importlib.util
import os
import select
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.connection import parse_url

from benchmarks.fetch import HOW_TO_FETCH, find_client
from benchmarks.plane.client import PlaneClient
from benchmarks.plane.messages import Setting
from benchmarks.plane.peers import Client, ScanningClient, Threads
from benchmarks.plane.values import Values
from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import ConfigError, RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.seal import SealKeys

_TIMEOUT_S = 30.0
_OP_TIMEOUT_S = 10.0


class OurClient(PlaneClient, ScanningClient):
    """The data plane, as an agent uses it."""

    def __init__(self, url: str, setting: Setting) -> None:
        options = RedisOptions(
            url,
            connections=setting.connections,
            network_threads=setting.threads,
            op_timeout_s=_OP_TIMEOUT_S,
            seal_keys=SealKeys([os.urandom(32)]) if setting.sealed else None,
            verify_checksums=setting.checksums,
        )
        super().__init__(options, setting.slot_bytes)
        self._keys: list[bytes] = []

    def store(self, fresh: bool = True) -> None:
        super().store()

    def prepare_scan(self, count: int) -> Sequence[bytes]:
        self._keys = self.absent_keys("bench-scan", count)
        return [stripe_key(key, 0) for key in self._keys]

    def scan_prepared(self) -> int:
        return self.scan(self._keys)


class RedisPyClient(ScanningClient):
    """redis-py with hiredis, one connection.

    `pipelined`: sends all commands before it reads the first reply; otherwise one by one.
    """

    def __init__(self, url: str, setting: Setting) -> None:
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=_TIMEOUT_S)
        self._pipelined = setting.how == "pipelined"
        self._values: list[tuple[str, memoryview]] = []
        self._keys: list[str] = []

    def close(self) -> None:
        self._client.close()

    def prepare(self, name: str, values: Values) -> None:
        self._values = _whole_values(name, values)

    def store(self, fresh: bool) -> None:
        if not self._pipelined:
            for key, value in self._values:
                self._client.set(key, value)
            return
        pipeline = self._client.pipeline(transaction=False)
        for key, value in self._values:
            pipeline.set(key, value)
        pipeline.execute()

    def load(self) -> None:
        if not self._pipelined:
            for key, value in self._values:
                value[:] = self._client.get(key)
            return
        pipeline = self._client.pipeline(transaction=False)
        for key, _ in self._values:
            pipeline.get(key)
        for (_, value), found in zip(self._values, pipeline.execute(), strict=True):
            value[:] = found

    def prepare_scan(self, count: int) -> Sequence[bytes]:
        self._keys = _text_keys(count)
        return [key.encode() for key in self._keys]

    def scan_prepared(self) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in self._keys:
            pipeline.exists(key)
        return _prefix_length(pipeline.execute())


class GlideClient(Client):
    """valkey-glide, its synchronous client, one for each thread; it loads in place."""

    def __init__(self, url: str, setting: Setting) -> None:
        import glide_sync

        address = parse_url(url)
        credentials = None
        if address.get("password"):
            credentials = glide_sync.ServerCredentials(
                password=address["password"], username=address.get("username")
            )
        configuration = glide_sync.GlideClientConfiguration(
            [glide_sync.NodeAddress(address.get("host", "127.0.0.1"), address.get("port", 6379))],
            credentials=credentials,
            database_id=address.get("db"),
            request_timeout=int(_TIMEOUT_S * 1e3),
            protocol=glide_sync.ProtocolVersion.RESP2,
        )
        count = setting.connections
        self._clients = [glide_sync.GlideClient.create(configuration) for _ in range(count)]
        self._threads = Threads(count)
        self._values: list[tuple[str, memoryview]] = []

    def close(self) -> None:
        self._threads.close()
        for client in self._clients:
            client.close()

    def prepare(self, name: str, values: Values) -> None:
        self._values = _whole_values(name, values)

    def store(self, fresh: bool) -> None:
        self._threads.run(self._set, len(self._values))

    def load(self) -> None:
        self._threads.run(self._get, len(self._values))

    def _set(self, thread: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            key, value = self._values[number]
            self._clients[thread].set(key, value)

    def _get(self, thread: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            key, value = self._values[number]
            if self._clients[thread].get(key, buffer=value) is None:
                raise RedisUnavailable(f"{key} is not there")


class LMCacheClient(ScanningClient):
    """LMCache's C++ client from its wheel alone; each worker is a thread with a connection.

    It never answers if a key is missing or the server is gone: then the caller kills its process.
    """

    def __init__(self, url: str, setting: Setting) -> None:
        address = parse_url(url)
        self._client = _load_lmcache().LMCacheRedisClient(
            address.get("host", "127.0.0.1"),
            address.get("port", 6379),
            setting.connections,
            address.get("username", ""),
            address.get("password", ""),
        )
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)
        self._keys: list[str] = []
        self._values: list[memoryview] = []
        self._scan_keys: list[str] = []

    def close(self) -> None:
        self._client.close()

    def prepare(self, name: str, values: Values) -> None:
        whole = _whole_values(name, values)
        self._keys = [key for key, _ in whole]
        self._values = [value for _, value in whole]

    def store(self, fresh: bool) -> None:
        self._finish(self._client.submit_batch_set(self._keys, self._values))

    def load(self) -> None:
        found = self._finish(self._client.submit_batch_get(self._keys, self._values))
        if not all(found):
            raise RedisUnavailable(f"{found.count(False)} of {len(found)} values did not come")

    def prepare_scan(self, count: int) -> Sequence[bytes]:
        self._scan_keys = _text_keys(count)
        return [key.encode() for key in self._scan_keys]

    def scan_prepared(self) -> int:
        return _prefix_length(self._finish(self._client.submit_batch_exists(self._scan_keys)))

    def _finish(self, batch: int) -> list[bool]:
        """Waits for a batch as LMCache does, at its event descriptor."""
        while True:
            self._poll.poll()
            for number, good, error, results in self._client.drain_completions():
                if number == batch:
                    if not good:
                        raise RedisUnavailable(f"a batch failed: {error}")
                    return list(results or ())


def _load_lmcache() -> Any:
    import torch  # noqa: F401  (the module needs its libraries)

    path = find_client()
    if path is None:
        raise ConfigError(HOW_TO_FETCH)
    spec = importlib.util.spec_from_file_location("lmcache_redis", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"this Python cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _whole_values(name: str, values: Values) -> list[tuple[str, memoryview]]:
    stem = f"bench@{values.value_bytes}@{name}@"
    return [(f"{stem}{number:032x}", slots[0]) for number, slots in enumerate(values.slots)]


def _text_keys(count: int) -> list[str]:
    """Keys about as long as those of LMCache."""
    return [f"bench/scan@1@0@{number:064x}" for number in range(count)]


def _prefix_length(present: Sequence[object]) -> int:
    """How many are true from the first on."""
    return next((n for n, found in enumerate(present) if not found), len(present))
