# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy before a real server that cuts, stalls, forges and holds back replies."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

from tests.resp.loopback import Forwarder, Link

_NAME = re.compile(rb"SETNAME\r\n\$\d+\r\nlmcache-redis:([a-z0-9-]+)")
_GET = b"*2\r\n$3\r\nGET\r\n"
_SET = re.compile(rb"\*3\r\n\$3\r\nSET\r\n\$(\d+)\r\n")


@dataclass(frozen=True)
class Cut:
    """Forward so many bytes of a reply, then close the connection."""

    after_bytes: int


@dataclass(frozen=True)
class Stall:
    """Forward so many bytes of the reply to a GET, then nothing more."""

    after_bytes: int


@dataclass(frozen=True)
class Forge:
    """Answer with these bytes; the server does not see a GET that is answered so."""

    reply: bytes


Action = Cut | Stall | Forge


class Proxy(Forwarder):
    """Listens on a free port and forwards to `port`. A context manager.

    for_gets: what to do with the next GETs, one action each; None forwards. While
    `acknowledge` is not set, replies to SET connections are held back; `hold_after` so many of
    them it is cleared. `stripes_set` has (chunk key, stripe index) of all SETs in the order they
    were sent.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.for_gets: deque[Action | None] = deque()
        self.acknowledge = threading.Event()
        self.acknowledge.set()
        self.stripes_set: list[tuple[bytes, int]] = []
        self.acknowledged = 0
        self.hold_after: int | None = None
        self._tickets = itertools.count()
        self._turn = 0
        self.gets = 0
        self._lock = threading.Lock()
        self._spoils: tuple[str, Cut | Forge] | None = None
        # Of a connection: what happens to the reply to its GET, and how many bytes are left.
        self._actions: dict[Link, tuple[Action, int]] = {}
        self._sent: defaultdict[Link, bytearray] = defaultdict(bytearray)

    def _ending(self) -> None:
        super()._ending()
        self.acknowledge.set()

    def cut_all(self) -> None:
        """Close every connection that is open now."""
        for link in list(self.links):
            link.close()

    def spoil(self, role: str, action: Cut | Forge) -> None:
        """Do this to the next reply on a connection of this role that was greeted, once.

        role: "get", "set" or "control".
        """
        with self._lock:
            self._spoils = role, action

    @property
    def is_to_spoil(self) -> bool:
        with self._lock:
            return self._spoils is not None

    def _upstream(self, link: Link) -> None:
        while data := link.client.recv(1 << 16):
            found = _NAME.search(data)
            if found is not None:
                link.name = found.group(1).decode()
            if link.name.startswith("set"):
                self._note_sets(self._sent[link], data)
            if data.startswith(_GET):
                self.gets += 1
                action = self.for_gets.popleft() if self.for_gets else None
                self._actions.pop(link, None)
                if isinstance(action, Forge):
                    link.client.sendall(action.reply)
                    continue
                if action == Cut(0):
                    return
                if action is not None:
                    self._actions[link] = action, action.after_bytes
            link.server.sendall(data)

    def _downstream(self, link: Link) -> None:
        is_greeted = False
        while data := link.server.recv(1 << 16):
            if link.name.startswith("set"):
                self._wait_for_turn()
                self.acknowledged += data.count(b"+OK\r\n")
                if self.hold_after is not None and self.acknowledged >= self.hold_after:
                    self.acknowledge.clear()
                    self.hold_after = None
                self._turn += 1
            spoil = self._spoil_of(link) if is_greeted else None
            is_greeted = bool(link.name)
            if isinstance(spoil, Forge):
                link.client.sendall(spoil.reply)
            elif isinstance(spoil, Cut):
                link.client.sendall(data[: spoil.after_bytes])
                return
            elif link in self._actions:
                action, left = self._actions[link]
                data = data[:left]
                self._actions[link] = action, left - len(data)
                link.client.sendall(data)
                if isinstance(action, Cut) and left == len(data):
                    return
            else:
                link.client.sendall(data)

    def _spoil_of(self, link: Link) -> Cut | Forge | None:
        with self._lock:
            if self._spoils is None or not link.name.startswith(self._spoils[0]):
                return None
            (_, action), self._spoils = self._spoils, None
            return action

    def _wait_for_turn(self) -> None:
        """Replies go on in the order in which they came, and no more of them than allowed."""
        ticket = next(self._tickets)
        while self._turn != ticket or not self.acknowledge.is_set():
            time.sleep(0.0005)

    def _note_sets(self, sent: bytearray, data: bytes) -> None:
        sent += data
        while (found := _SET.search(sent)) is not None:
            key_at = found.end()
            key_end = key_at + int(found.group(1))
            line_end = sent.find(b"\r\n", key_end + 3)
            if line_end < 0:
                return
            value_end = line_end + 2 + int(sent[key_end + 3 : line_end]) + 2
            if len(sent) < value_end:
                return
            key = bytes(sent[key_at:key_end])
            self.stripes_set.append((key[:-2], int.from_bytes(key[-2:], "big")))
            del sent[:value_end]
