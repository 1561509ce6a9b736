# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that forwards everything later: a link that is long, not narrow."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


class LongLink:
    """Listens on a free port and forwards to ``port``, each byte ``delay_s`` later.

    A context manager.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self.delay_s = delay_s
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> LongLink:
        _start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            _end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += client, server
                _start(self._forward, client, server)
                _start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        arrived: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        _start(_deliver, arrived, target)
        data = b"some"
        with contextlib.suppress(OSError):
            while data:
                data = source.recv(1 << 20)
                arrived.put((time.monotonic() + self.delay_s, data))
        arrived.put((0.0, b""))


def _deliver(arrived: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            due_s, data = arrived.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            if not data:
                break
            target.sendall(data)
    _end(target)


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
