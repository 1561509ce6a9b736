"""redis-py with hiredis: whole chunks as values on one connection."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import (
    ScanningClient,
    prefix_length,
    text_keys,
    whole_values,
)
from lmcache_redis.bench.plane.values import Values

_TIMEOUT_S = 30.0


class RedisPyClient(ScanningClient):
    """`pipelined`: all commands go out before the first reply is read; or one by one."""

    def __init__(self, url: str, setting: Setting) -> None:
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=_TIMEOUT_S)
        self._pipelined = setting.how == "pipelined"
        self._values: list[tuple[str, memoryview]] = []
        self._keys: list[str] = []

    def close(self) -> None:
        self._client.close()

    def prepare(self, name: str, values: Values) -> None:
        self._values = whole_values(name, values)

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
        self._keys = text_keys(count)
        return [key.encode() for key in self._keys]

    def scan(self) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in self._keys:
            pipeline.exists(key)
        return prefix_length(pipeline.execute())
