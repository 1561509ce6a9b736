"""valkey-glide, its synchronous client: whole chunks as values, a client for each thread."""

from __future__ import annotations

from collections.abc import Iterator

import glide_sync
from redis.connection import parse_url

from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import Client, Threads, whole_values
from lmcache_redis.bench.plane.values import Values
from lmcache_redis.errors import RedisUnavailable

_TIMEOUT_MS = 30_000


class GlideClient(Client):
    """Values are loaded into their memory by the client itself."""

    def __init__(self, url: str, setting: Setting) -> None:
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
            request_timeout=_TIMEOUT_MS,
            protocol=glide_sync.ProtocolVersion.RESP2,
        )
        count = setting.get_connections
        self._clients = [glide_sync.GlideClient.create(configuration) for _ in range(count)]
        self._threads = Threads(count)
        self._values: list[tuple[str, memoryview]] = []

    def close(self) -> None:
        self._threads.close()
        for client in self._clients:
            client.close()

    def prepare(self, name: str, values: Values) -> None:
        self._values = whole_values(name, values)

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
