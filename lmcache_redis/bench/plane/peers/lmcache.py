"""LMCache's C++ client, loaded from its wheel alone: whole chunks as values, batches.

It never answers for a key that does not exist, nor when the server goes: its process is
ended then, by whoever waits for it.
"""

from __future__ import annotations

import importlib.util
import select
from collections.abc import Sequence
from typing import Any

from redis.connection import parse_url

from lmcache_redis.bench.plane.fetch import find_client
from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import (
    ScanningClient,
    prefix_length,
    text_keys,
    whole_values,
)
from lmcache_redis.bench.plane.values import Values
from lmcache_redis.errors import ConfigError, RedisUnavailable


class LMCacheClient(ScanningClient):
    """The client with so many workers, each a thread with a connection."""

    def __init__(self, url: str, setting: Setting) -> None:
        address = parse_url(url)
        self._client = _load_module().LMCacheRedisClient(
            address.get("host", "127.0.0.1"),
            address.get("port", 6379),
            setting.get_connections,
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
        whole = whole_values(name, values)
        self._keys = [key for key, _ in whole]
        self._values = [value for _, value in whole]

    def store(self, fresh: bool) -> None:
        self._finish(self._client.submit_batch_set(self._keys, self._values))

    def load(self) -> None:
        found = self._finish(self._client.submit_batch_get(self._keys, self._values))
        if not all(found):
            raise RedisUnavailable(f"{found.count(False)} of {len(found)} values did not come")

    def prepare_scan(self, count: int) -> Sequence[bytes]:
        self._scan_keys = text_keys(count)
        return [key.encode() for key in self._scan_keys]

    def scan(self) -> int:
        return prefix_length(self._finish(self._client.submit_batch_exists(self._scan_keys)))

    def _finish(self, batch: int) -> list[bool]:
        """Waits for a batch as LMCache does, at its event descriptor."""
        while True:
            self._poll.poll()
            for number, good, error, results in self._client.drain_completions():
                if number == batch:
                    if not good:
                        raise RedisUnavailable(f"a batch failed: {error}")
                    return list(results or ())


def _load_module() -> Any:
    import torch  # noqa: F401  (the module needs its libraries)

    path = find_client()
    if path is None:
        raise ConfigError("LMCache's C++ client is not here: `lmcache_redis.bench.plane.fetch`")
    spec = importlib.util.spec_from_file_location("lmcache_redis", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no module that this Python can load")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
