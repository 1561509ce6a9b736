# SPDX-License-Identifier: Apache-2.0
"""The server that all clients share: emptied and limited between measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from lmcache_redis.errors import RedisUnavailable

_TIMEOUT_S = 30.0


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """redis-py's errors as ours."""
    try:
        yield
    except redis.RedisError as error:
        raise RedisUnavailable(f"the server cannot be used: {error}") from None


class Server:
    """What the benchmark does with a server besides moving bytes.

    Every method but `close` raises RedisUnavailable if the server refuses.
    """

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url, protocol=2, socket_timeout=_TIMEOUT_S, decode_responses=True
        )

    def close(self) -> None:
        self._client.close()

    def version(self) -> str:
        """Product and version, shown with every figure."""
        with _translated():
            facts = self._client.info("server")
        name = facts.get("server_name", "redis")
        return f"{name} {facts.get('valkey_version', facts.get('redis_version'))}"

    def flush(self) -> None:
        """Empties it and gives its memory back: the next client stores into fresh memory."""
        with _translated():
            self._client.flushall(asynchronous=False)
            with contextlib.suppress(redis.ResponseError):
                self._client.execute_command("MEMORY", "PURGE")

    @contextlib.contextmanager
    def full(self, room_bytes: int) -> Iterator[None]:
        """In the block, its memory limit is what it holds plus `room_bytes`, and it evicts."""
        with _translated():
            before = {
                name: self._client.config_get(name)[name]
                for name in ("maxmemory", "maxmemory-policy")
            }
            self._client.config_set("maxmemory-policy", "allkeys-lru")
            used = int(self._client.info("memory")["used_memory"])
            self._client.config_set("maxmemory", used + room_bytes)
        try:
            yield
        finally:
            with _translated():
                for name, value in before.items():
                    self._client.config_set(name, value)

    def evicted_keys(self) -> int:
        """How many keys it has evicted since it started."""
        with _translated():
            return int(self._client.info("stats")["evicted_keys"])
