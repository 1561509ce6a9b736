# SPDX-License-Identifier: Apache-2.0
"""A proxy before a real server that answers some commands itself, as proxies for Redis do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import hiredis

from tests.resp.loopback import Loopback

# What is said to the words of a command; None: the connection is closed.
Reply = bytes | None
Answers = Mapping[bytes, "Reply | Callable[[list[bytes]], Reply]"]

_INFO = b"# Server\r\nredis_version:7.2.0\r\nredis_mode:cluster\r\ncluster_enabled:1\r\n"
# As Envoy 1.40 answers with two backends that are no cluster.
ENVOY: Answers = {
    b"CLIENT": b"-unsupported command 'client'\r\n",
    b"CONFIG": b"-ERR unknown command 'CONFIG', with args beginning with: get\r\n",
    b"DBSIZE": b"-ERR unknown command 'DBSIZE', with args beginning with: \r\n",
    b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n",
    b"INFO": b"$%d\r\n%b\r\n" % (len(_INFO), _INFO),
    # Both backends' replies, one after the other.
    b"SCAN": b"*4\r\n$1\r\n0\r\n*0\r\n$1\r\n0\r\n*0\r\n",
    b"SELECT": b"-invalid request\r\n",
}
# As twemproxy 0.5: it closes at what it does not know.
TWEMPROXY: Answers = dict.fromkeys(
    (b"CLIENT", b"CONFIG", b"DBSIZE", b"CLUSTER", b"INFO", b"SCAN", b"SELECT")
)


class OddProxy(Loopback):
    """Listens on loopback and forwards to `port` all commands that are not among `answers`."""

    def __init__(self, port: int, answers: Answers) -> None:
        super().__init__()
        self._port = port
        self._answers = answers
        self.commands: list[bytes] = []  # the first word of each that was sent
        self.accepted = 0

    def _serve(self, client: socket.socket) -> None:
        self.accepted += 1
        server = socket.create_connection(("127.0.0.1", self._port))
        self._socks.append(server)
        requests = hiredis.Reader()
        while data := client.recv(1 << 16):
            requests.feed(data)
            while isinstance(words := requests.gets(), list):
                reply = self._answer(words, server)
                if reply is None:
                    return
                client.sendall(reply)

    def _answer(self, words: list[bytes], server: socket.socket) -> Reply:
        name = words[0].upper()
        self.commands.append(name)
        if name in self._answers:
            answer = self._answers[name]
            return answer(words) if callable(answer) else answer
        server.sendall(hiredis.pack_command(tuple(words)))
        reader, reply = hiredis.Reader(), b""
        while reader.gets() is False:
            data = server.recv(1 << 16)
            if not data:
                return None
            reader.feed(data)
            reply += data
        return reply
