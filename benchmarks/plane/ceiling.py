# SPDX-License-Identifier: Apache-2.0
"""Upper bounds for every client: the same bytes over bare sockets to a sink and back, and memcpy.

`python -m benchmarks.plane.ceiling` is the sink: it receives and sends bytes, the minimum work of a
server. A request has 9 bytes: what, and how many bytes. After FRESH and AGAIN the bytes follow, and
one byte answers them; after SEND as many bytes are sent back. FRESH keeps them in new memory, as a
server does, until DROP; the others reuse one small buffer. The port is on stdout; the process ends
when its stdin is closed.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np

from benchmarks import ROOT
from benchmarks.plane.messages import Setting
from benchmarks.plane.peers import Client, Threads
from benchmarks.plane.values import Values
from lmcache_redis.errors import RedisUnavailable

_FRESH, _AGAIN, _SEND, _DROP = b"F", b"A", b"S", b"D"
_ACKNOWLEDGED = b"k"
_REQUEST = struct.Struct("<cQ")
# Stays in a core's cache.
_BUFFER_BYTES = 256 << 10

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class BareSocket(Client):
    """Loopback TCP to a sink, one thread for each connection.

    Each value has a request and an answer, as with a server. Without them small values are slower,
    because the bytes in flight then exceed the caches.
    """

    brings_values = False

    def __init__(self, setting: Setting) -> None:
        self._sink = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plane.ceiling"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._sink.stdout is not None
        port = int(self._sink.stdout.readline())
        count = setting.connections
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = Threads(count)
        self._values: list[memoryview] = []
        self._kind = _FRESH

    def close(self) -> None:
        self._threads.close()
        for connection in self._sockets:
            connection.close()
        self._sink.communicate()  # ends with its stdin

    def prepare(self, name: str, values: Values) -> None:
        self._values = [slots[0] for slots in values.slots]
        for connection in self._sockets:
            connection.sendall(_REQUEST.pack(_DROP, 0))
            self._wait(connection)

    def store(self, fresh: bool) -> None:
        self._kind = _FRESH if fresh else _AGAIN
        self._threads.run(self._send, len(self._values))

    def load(self) -> None:
        self._threads.run(self._receive, len(self._values))

    def _send(self, thread: int, numbers: Iterator[int]) -> None:
        connection = self._sockets[thread]
        for number in numbers:
            value = self._values[number]
            request = _REQUEST.pack(self._kind, value.nbytes)
            # In one call: a separate request would wake the sink twice.
            sent = connection.sendmsg([request, value]) - len(request)
            connection.sendall(value[max(0, sent) :])
            self._wait(connection)

    def _receive(self, thread: int, numbers: Iterator[int]) -> None:
        connection = self._sockets[thread]
        for number in numbers:
            value = self._values[number]
            connection.sendall(_REQUEST.pack(_SEND, value.nbytes))
            if not _fill(connection, value):
                raise RedisUnavailable("the sink has ended")

    @staticmethod
    def _wait(connection: socket.socket) -> None:
        if connection.recv(1) != _ACKNOWLEDGED:
            raise RedisUnavailable("the sink has ended")


class MemoryCopy(Client):
    """The values copied to memory beside them and back, by one thread."""

    def __init__(self) -> None:
        self._values: list[memoryview] = []
        self._copy: Bytes | None = None

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

    def _pairs(self, fresh: bool) -> Iterator[tuple[Bytes, Bytes]]:
        total = sum(value.nbytes for value in self._values)
        if fresh or self._copy is None or self._copy.nbytes != total:
            self._copy = None
            self._copy = np.frombuffer(mmap.mmap(-1, total), np.uint8)
        at = 0
        for value in self._values:
            yield self._copy[at : at + value.nbytes], np.frombuffer(value, np.uint8)
            at += value.nbytes


# --------------------------------------------------------------------- the sink


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Fills the buffer; False if the connection was closed."""
    while buffer.nbytes:
        # Without MSG_WAITALL, which would delay the sender.
        count = connection.recv_into(buffer)
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def _serve(connection: socket.socket) -> None:
    """Answers requests of one connection until it is closed."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    request = memoryview(bytearray(_REQUEST.size))
    kept: list[memoryview] = []
    while _fill(connection, request):
        what, total = _REQUEST.unpack(request)
        pieces = _pieces(buffer, total)
        if what == _SEND:
            for piece in pieces:
                connection.sendall(piece)
            continue
        if what == _DROP:
            kept.clear()
        elif what == _FRESH:
            kept.append(memoryview(mmap.mmap(-1, total)))
            pieces = (kept[-1][at : at + _BUFFER_BYTES] for at in range(0, total, _BUFFER_BYTES))
        if not all(_fill(connection, piece) for piece in pieces):
            return
        connection.sendall(_ACKNOWLEDGED)


def _pieces(buffer: memoryview, total: int) -> Iterator[memoryview]:
    """The buffer repeatedly, as long as bytes are expected; the last piece may be shorter."""
    return (buffer[: total - at] for at in range(0, total, buffer.nbytes))


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
