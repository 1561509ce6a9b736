# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that spoils the next reply on a connection of a given role, once."""

from __future__ import annotations

import re
import threading

from tests.resp.loopback import Forwarder, Link

_NAME = re.compile(rb"SETNAME\r\n\$\d+\r\nlmcache-redis:([a-z]+)")


class Scissors(Forwarder):
    """Forwards to `port`. role: "get", "set" or "control", of all such connections.

    A role is known when its connection has been named, and the reply to that is through.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._lock = threading.Lock()
        self._role = ""
        self._cut_after: int | None = None
        self._instead = b""

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

    def _upstream(self, link: Link) -> None:
        while data := link.client.recv(1 << 16):
            found = _NAME.search(data)
            if found is not None:
                link.name = found.group(1).decode()
            link.server.sendall(data)

    def _downstream(self, link: Link) -> None:
        role = ""
        while data := link.server.recv(1 << 16):
            if not role:
                # The reply to the naming itself: from the next one on.
                role = link.name
                link.client.sendall(data)
                continue
            with self._lock:
                mine = bool(self._role) and self._role == role
                if mine:
                    self._role = ""
                after, instead = self._cut_after, self._instead
            if not mine:
                link.client.sendall(data)
            elif after is None:
                link.client.sendall(instead)
            else:
                link.client.sendall(data[:after])
                return
