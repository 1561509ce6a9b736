# SPDX-License-Identifier: Apache-2.0
"""What the servers and proxies of the tests share: a listener, and a thread for each client."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

_Server = TypeVar("_Server", bound="Loopback")


class Loopback(ABC):
    """Listens on loopback. A context manager: its end closes every connection, and all threads."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        if listener is None:
            self.port = int(self._listener.getsockname()[1])
            self.url = f"redis://127.0.0.1:{self.port}"

    def __enter__(self: _Server) -> _Server:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending()
        shut_down(self._listener, *self._socks)
        for thread in self._threads:
            thread.join(10)
        for sock in (self._listener, *self._socks):
            sock.close()

    @abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """In a thread of the client's own. OSError ends it."""

    def _ending(self) -> None:
        """Lets threads go on that wait for something else than a socket."""
        self._over.set()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._socks.append(client)
                if client.family != socket.AF_UNIX:
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._spawn(self._serve_one, client)

    def _serve_one(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(client)
        # Both ends see it: a client must not wait for what will never come.
        shut_down(client)


def shut_down(*socks: socket.socket) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            # Not that of TLS, which would wait for the other end.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Link:
    """A client, and its connection to the server behind a proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.name = ""

    def close(self) -> None:
        shut_down(self.client, self.server)


class Forwarder(Loopback):
    """A proxy before the server at `port`, with a link for each client."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.links: list[Link] = []

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port))
        self._socks.append(server)
        link = Link(client, server)
        self.links.append(link)
        self._spawn(self._end_with, link, self._downstream)
        self._end_with(link, self._upstream)

    def _end_with(self, link: Link, forward: Callable[[Link], None]) -> None:
        with contextlib.suppress(OSError):
            forward(link)
        link.close()

    @abstractmethod
    def _upstream(self, link: Link) -> None:
        """What the client sends."""

    @abstractmethod
    def _downstream(self, link: Link) -> None:
        """What the server answers."""
