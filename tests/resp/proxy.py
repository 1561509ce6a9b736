# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy before a real server that cuts, stalls, forges and holds back replies."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

_NAME = re.compile(rb"SETNAME\r\n\$\d+\r\nlmcache-redis:([a-z0-9-]+)")
_GET = b"*2\r\n$3\r\nGET\r\n"
_SET = re.compile(rb"\*3\r\n\$3\r\nSET\r\n\$(\d+)\r\n")


@dataclass(frozen=True)
class Cut:
    """Forward so many bytes of the reply to a GET, then close the connection."""

    after_bytes: int


@dataclass(frozen=True)
class Stall:
    """Forward so many bytes of the reply to a GET, then nothing more."""

    after_bytes: int


@dataclass(frozen=True)
class Forge:
    """Answer a GET with these bytes; the server does not see it."""

    reply: bytes
    close: bool = False


Action = Cut | Stall | Forge


@dataclass
class _Link:
    client: socket.socket
    server: socket.socket
    name: str = ""
    action: Action | None = None
    left: int = 0
    sent: bytearray = field(default_factory=bytearray)

    def close(self) -> None:
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on a free port and forwards to `port`. A context manager.

    for_gets: what to do with the next GETs, one action each; None forwards. While
    `acknowledge` is not set, replies to SET connections are held back; `hold_after` so many of
    them it is cleared. `stripes_set` has (chunk key, stripe index) of all SETs in the order they
    were sent.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self.for_gets: deque[Action | None] = deque()
        self.acknowledge = threading.Event()
        self.acknowledge.set()
        self.stripes_set: list[tuple[bytes, int]] = []
        self.acknowledged = 0
        self.hold_after: int | None = None
        self._tickets = itertools.count()
        self._turn = 0
        self.gets = 0
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __enter__(self) -> Proxy:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self.acknowledge.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut_all()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        for link in self._links:
            link.client.close()
            link.server.close()

    def cut_all(self, name: str = "") -> None:
        """Close every connection that is open now; only those whose name begins with ``name``."""
        for link in list(self._links):
            if link.name.startswith(name):
                link.close()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()
                continue
            link = _Link(client, server)
            self._links.append(link)
            self._spawn(self._upstream, link)
            self._spawn(self._downstream, link)

    def _upstream(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(1 << 16):
                found = _NAME.search(data)
                if found is not None:
                    link.name = found.group(1).decode()
                if link.name.startswith("set"):
                    self._note_sets(link, data)
                if data.startswith(_GET):
                    self.gets += 1
                    action = self.for_gets.popleft() if self.for_gets else None
                    link.action = action
                    if isinstance(action, Forge):
                        link.client.sendall(action.reply)
                        if action.close:
                            break
                        continue
                    if action is not None:
                        link.left = action.after_bytes
                        if action == Cut(0):
                            break
                link.server.sendall(data)
        link.close()

    def _downstream(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(1 << 16):
                if link.name.startswith("set"):
                    self._wait_for_turn()
                    self.acknowledged += data.count(b"+OK\r\n")
                    if self.hold_after is not None and self.acknowledged >= self.hold_after:
                        self.acknowledge.clear()
                        self.hold_after = None
                    self._turn += 1
                if link.action is not None:
                    data = data[: link.left]
                    link.left -= len(data)
                link.client.sendall(data)
                if isinstance(link.action, Cut) and link.left == 0:
                    break
        link.close()

    def _wait_for_turn(self) -> None:
        """Replies go on in the order in which they came, and no more of them than allowed."""
        ticket = next(self._tickets)
        while self._turn != ticket or not self.acknowledge.is_set():
            time.sleep(0.0005)

    def _note_sets(self, link: _Link, data: bytes) -> None:
        link.sent += data
        while (found := _SET.search(link.sent)) is not None:
            key_at = found.end()
            key_end = key_at + int(found.group(1))
            line_end = link.sent.find(b"\r\n", key_end + 3)
            if line_end < 0:
                return
            value_end = line_end + 2 + int(link.sent[key_end + 3 : line_end]) + 2
            if len(link.sent) < value_end:
                return
            key = bytes(link.sent[key_at:key_end])
            self.stripes_set.append((key[:-2], int.from_bytes(key[-2:], "big")))
            del link.sent[:value_end]
