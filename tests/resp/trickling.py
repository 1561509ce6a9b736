# SPDX-License-Identifier: Apache-2.0
"""A server on a real socket that answers as told: at once, a byte now and then, without end."""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis

from tests.resp.loopback import Loopback, shut_down

# Then a server that trickles goes away, so that who waits for it anyway fails, and is told so.
_LONGEST_S = 5.0
_PLAIN = {b"PING": b"+PONG\r\n", b"EXISTS": b":0\r\n"}


def packed(value: Any) -> bytes:
    """As a server sends it."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(packed, value))


@dataclass(frozen=True)
class Trickle:
    """A byte of `data` every `pause_s`, and then what `data` ends with, again and again."""

    data: bytes
    pause_s: float = 0.05


@dataclass(frozen=True)
class Endless:
    """`start`, and then `again` as fast as it goes."""

    start: bytes
    again: bytes


Answer = bytes | Trickle | Endless | None


class LyingServer(Loopback):
    """Listens on loopback, or on a unix socket at `path`. A context manager.

    answer: what to say to a command, given its words; None: what a good server would say.
    reads_slowly: takes so many bytes every 50 ms, no more.
    """

    def __init__(
        self,
        answer: Callable[[list[bytes]], Answer] = lambda words: None,
        *,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        trickle_tls: bool = False,
    ) -> None:
        unix = None if path is None else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if unix is not None:
            unix.bind(str(path))
            unix.listen()
        super().__init__(unix)
        if path is not None:
            self.url = f"unix://{path}"
        elif tls or trickle_tls:
            self.url = self.url.replace("redis://", "rediss://")
        self._answer = answer
        self._tls = tls
        self._trickle_tls = trickle_tls
        self.reads_slowly = 0
        self.commands: list[list[bytes]] = []

    def _serve(self, client: socket.socket) -> None:
        sock = client
        if self._trickle_tls:
            # The head of a TLS record of 16 KiB, of which a byte comes now and then.
            self._trickle(sock, b"\x16\x03\x03\x40\x00" + bytes(500), 0.05)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._socks.append(sock)
            for words in self._commands(sock):
                self.commands.append(words)
                self._say(sock, self._answer(words), words)
        finally:
            shut_down(sock)

    def _commands(self, sock: socket.socket) -> Iterator[list[bytes]]:
        reader = hiredis.Reader()
        while True:
            while (words := reader.gets()) is False:
                reader.feed(self._receive(sock))
            yield words

    def _receive(self, sock: socket.socket) -> bytes:
        if self.reads_slowly and self._over.wait(0.05):
            raise OSError
        data = sock.recv(self.reads_slowly or 1 << 16)
        if not data:
            raise OSError
        return data

    def _say(self, sock: socket.socket, answer: Answer, words: list[bytes]) -> None:
        if answer is None:
            answer = _PLAIN.get(words[0], b"+OK\r\n")
        if isinstance(answer, bytes):
            sock.sendall(answer)
        elif isinstance(answer, Trickle):
            self._trickle(sock, answer.data, answer.pause_s)
        else:
            sock.sendall(answer.start)
            while not self._over.is_set():
                sock.sendall(answer.again)

    def _trickle(self, sock: socket.socket, data: bytes, pause_s: float) -> None:
        until = time.monotonic() + _LONGEST_S
        for byte in itertools.chain(data, itertools.repeat(data[-1])):
            sock.sendall(bytes((byte,)))
            if self._over.wait(pause_s) or time.monotonic() > until:
                raise OSError
