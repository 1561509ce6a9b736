# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that spoils the next reply on a connection of a given role, once."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from types import TracebackType

_NAME = re.compile(rb"SETNAME\r\n\$\d+\r\nlmcache-redis:([a-z]+)")


class Scissors:
    """Forwards to `port`. role: "get", "set" or "control", of all such connections.

    A role is known when its connection has been named, and the reply to that is through.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._role = ""
        self._cut_after: int | None = None
        self._instead = b""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def cut(self, role: str, after_bytes: int) -> None:
        """Of the next reply, let so many bytes through, then close."""
        with self._lock:
            self._role, self._cut_after = role, after_bytes

    def replace(self, role: str, reply: bytes) -> None:
        """In place of the next reply, these bytes; the connection stays."""
        with self._lock:
            self._role, self._cut_after, self._instead = role, None, reply

    @property
    def armed(self) -> bool:
        """Whether what was asked for is still to be done."""
        with self._lock:
            return bool(self._role)

    def __enter__(self) -> Scissors:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets.append(server)
                link = _Link(client, server)
                self._spawn(self._upstream, link)
                self._spawn(self._downstream, link)

    def _upstream(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(1 << 16):
                found = _NAME.search(data)
                if found is not None:
                    link.named = found.group(1).decode()
                link.server.sendall(data)
        link.close()

    def _downstream(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(1 << 16):
                if not link.role:
                    # The reply to the naming itself: from the next one on.
                    link.role = link.named
                    link.client.sendall(data)
                    continue
                with self._lock:
                    mine = bool(self._role) and self._role == link.role
                    if mine:
                        self._role = ""
                    after, instead = self._cut_after, self._instead
                if not mine:
                    link.client.sendall(data)
                elif after is None:
                    link.client.sendall(instead)
                else:
                    link.client.sendall(data[:after])
                    break
        link.close()


class _Link:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.named = ""
        self.role = ""

    def close(self) -> None:
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
