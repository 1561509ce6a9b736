"""The server that all clients share: started, emptied and limited between measurements."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import redis

from lmcache_redis.embedded import find_server_binary
from lmcache_redis.errors import RedisUnavailable

_START_S = 10.0
_TIMEOUT_S = 30.0


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A redis-server of our own on a free loopback port, ended on exit; gives its URL."""
    executable = find_server_binary()
    with tempfile.TemporaryDirectory() as directory:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", directory, "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port, process)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """redis-py's errors as ours."""
    try:
        yield
    except redis.RedisError as error:
        raise RedisUnavailable(f"the server cannot be used: {error}") from None


class Server:
    """What the benchmark does to a server beside moving bytes.

    Every method but `close` raises RedisUnavailable where the server does not do it.
    """

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url, protocol=2, socket_timeout=_TIMEOUT_S, decode_responses=True
        )

    def close(self) -> None:
        self._client.close()

    def version(self) -> str:
        """What to say of the server beside every figure."""
        with _translated():
            facts = self._client.info("server")
        name = facts.get("server_name", "redis")
        return f"{name} {facts.get('valkey_version', facts.get('redis_version'))}"

    def flush(self) -> None:
        """Empties it, its memory given back: who comes next stores into fresh memory."""
        with _translated():
            self._client.flushall(asynchronous=False)
            with contextlib.suppress(redis.ResponseError):
                self._client.execute_command("MEMORY", "PURGE")

    @contextlib.contextmanager
    def full(self, room_bytes: int) -> Iterator[None]:
        """Limits it to what it holds and `room_bytes`; beyond that it evicts, until the exit."""
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


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while not _listens(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RedisUnavailable("the redis-server did not start")
        time.sleep(0.01)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
