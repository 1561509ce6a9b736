"""What bounds every client: the same bytes over bare sockets to a sink and back, and memcpy."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import Client, Threads
from lmcache_redis.bench.plane.peers.sink import (
    ACKNOWLEDGED,
    AGAIN,
    DROP,
    FRESH,
    REQUEST,
    SEND,
    receive,
)
from lmcache_redis.bench.plane.values import Values
from lmcache_redis.errors import RedisUnavailable


class BareSocket(Client):
    """Loopback TCP to a process that takes the bytes (`sink`) and sends as many back.

    Each value has a request and an answer, as with a server: streamed without, small values
    are slower, since what is under way then falls out of the caches.
    """

    brings_values = False

    def __init__(self, setting: Setting) -> None:
        self._sink = subprocess.Popen(
            [sys.executable, "-m", "lmcache_redis.bench.plane.peers.sink"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._sink.stdout is not None
        port = int(self._sink.stdout.readline())
        count = setting.get_connections
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = Threads(count)
        self._values: list[memoryview] = []
        self._fresh = True

    def close(self) -> None:
        self._threads.close()
        for connection in self._sockets:
            connection.close()
        self._sink.kill()
        self._sink.wait()
        for pipe in (self._sink.stdin, self._sink.stdout):
            if pipe is not None:
                pipe.close()

    def prepare(self, name: str, values: Values) -> None:
        self._values = [slots[0] for slots in values.slots]
        for connection in self._sockets:
            connection.sendall(REQUEST.pack(DROP, 0))
            self._wait(connection)

    def store(self, fresh: bool) -> None:
        self._fresh = fresh
        self._threads.run(self._send, len(self._values))

    def load(self) -> None:
        self._threads.run(self._receive, len(self._values))

    def _send(self, thread: int, numbers: Iterator[int]) -> None:
        connection, what = self._sockets[thread], FRESH if self._fresh else AGAIN
        for number in numbers:
            value = self._values[number]
            request = REQUEST.pack(what, value.nbytes)
            # At once: a request on its own would wake the sink for nothing.
            sent = connection.sendmsg([request, value]) - len(request)
            connection.sendall(value[max(0, sent) :])
            self._wait(connection)

    def _receive(self, thread: int, numbers: Iterator[int]) -> None:
        connection = self._sockets[thread]
        for number in numbers:
            value = self._values[number]
            connection.sendall(REQUEST.pack(SEND, value.nbytes))
            if not receive(connection, value):
                raise RedisUnavailable("the sink has gone")

    @staticmethod
    def _wait(connection: socket.socket) -> None:
        if connection.recv(1) != ACKNOWLEDGED:
            raise RedisUnavailable("the sink has gone")


class MemoryCopy(Client):
    """The values copied to memory beside them and back, by one thread."""

    def __init__(self) -> None:
        self._values: list[memoryview] = []
        self._copy: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def close(self) -> None:
        self._copy = None

    def prepare(self, name: str, values: Values) -> None:
        self._values = [slots[0] for slots in values.slots]

    def store(self, fresh: bool) -> None:
        for kept, value in self._pairs(fresh):
            kept[:] = value

    def load(self) -> None:
        for kept, value in self._pairs(fresh=False):
            value[:] = kept

    def _pairs(
        self, fresh: bool
    ) -> Iterator[
        tuple[
            np.ndarray[tuple[int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.uint8]]
        ]
    ]:
        total = sum(value.nbytes for value in self._values)
        if fresh or self._copy is None or self._copy.nbytes != total:
            self._copy = None
            self._copy = np.frombuffer(mmap.mmap(-1, total), np.uint8)
        at = 0
        for value in self._values:
            yield self._copy[at : at + value.nbytes], np.frombuffer(value, np.uint8)
            at += value.nbytes
