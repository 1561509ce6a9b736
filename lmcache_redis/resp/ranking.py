# SPDX-License-Identifier: Apache-2.0
"""Which keys a server uses most, for agents with `--warm-bytes`.

A SCAN finds the keys, and OBJECT says how often each is used under an LFU policy, else since when
it is not. Neither counts as a use. No server has to tell its policy: one that has another refuses
OBJECT FREQ.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import STEP_KEYS, Steps, parse_scan
from lmcache_redis.resp.net.wire import ErrorReply, error_of, pack_command
from lmcache_redis.tiers import CallOutcome

# Keys that SCANs go through, others' too, and those of them that are asked for, at all servers
# together. SCAN goes by a hash of the keys: the first ones are a sample.
MOST_SCANNED = 1 << 22
MOST_ASKED = 1 << 20


class RankedKeys(NamedTuple):
    """keys: the most used first, without a stripe index. refused: why a server does not tell."""

    outcome: CallOutcome
    keys: Sequence[bytes] = ()
    refused: str = ""


class MostUsed:
    """The most used of the keys that are added; see `FoundNames` for those asked for.

    Thread-safe: each server has a thread. refused: the first error.
    """

    def __init__(self, prefixes: Sequence[bytes], suffix: bytes, limit: int) -> None:
        self.refused = ""
        self._prefixes = tuple(prefixes)
        self._suffix = suffix
        self._limit = limit
        self._left_steps = MOST_SCANNED // STEP_KEYS
        self._left_keys = MOST_ASKED
        self._lock = threading.Lock()
        self._heap: list[tuple[int, bytes]] = []  # the least used first

    def may_scan(self) -> bool:
        """Whether to look for more keys, with one SCAN. MATCH hides what it has passed."""
        with self._lock:
            self._left_steps -= 1
            return self._left_steps >= 0 and self._left_keys > 0

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        return [k for k in keys if k.startswith(self._prefixes) and k.endswith(self._suffix)]

    def add(self, keys: Sequence[bytes], uses: Sequence[int | None]) -> None:
        """uses: higher is more; None: it is gone."""
        with self._lock:
            self._left_keys -= len(keys)
            for key, use in zip(keys, uses, strict=True):
                if use is not None:
                    add = heapq.heappush if len(self._heap) < self._limit else heapq.heappushpop
                    add(self._heap, (use, key))

    def refuse(self, reply: ErrorReply) -> None:
        with self._lock:
            self.refused = self.refused or str(error_of(reply))

    def ranked(self) -> list[bytes]:
        """A SCAN may name a key twice."""
        with self._lock:
            best = sorted(self._heap, reverse=True)
        return [*dict.fromkeys(key[: len(key) - len(self._suffix)] for _, key in best)]


def walk_uses(pattern: bytes, found: MostUsed) -> Steps[None]:
    """SCAN a server for keys that match, and ask how much those are used that are wanted."""
    ask, cursor = _ask_frequency, b""
    while cursor != b"0" and found.may_scan():
        words = ("MATCH", pattern, "COUNT", STEP_KEYS, "TYPE", "string")
        connection = yield (pack_command("SCAN", cursor or b"0", *words),), 1
        (reply,) = connection.receive_all()
        if isinstance(reply, ErrorReply):
            found.refuse(reply)
            return
        cursor, keys = parse_scan(reply)
        if not (keys := found.wanted(keys)):
            continue
        uses = yield from _uses(ask, keys)
        if isinstance(uses, ErrorReply) and uses.code != "NOPERM" and ask is _ask_frequency:
            ask = _ask_idle_time
            uses = yield from _uses(ask, keys)
        if isinstance(uses, ErrorReply):
            found.refuse(uses)
            return
        found.add(keys, uses)


def _ask_frequency(key: bytes) -> bytes:
    return pack_command("OBJECT", "FREQ", key)


def _ask_idle_time(key: bytes) -> bytes:
    return pack_command("OBJECT", "IDLETIME", key)


def _uses(
    ask: Callable[[bytes], bytes], keys: Sequence[bytes]
) -> Steps[list[int | None] | ErrorReply]:
    """How much each is used; the first refusal, unless it is that a key has moved."""
    connection = yield (b"".join(map(ask, keys)),), len(keys)
    sign, uses = (1 if ask is _ask_frequency else -1), list[int | None]()
    refused = None
    for reply in connection.receive_all():
        if isinstance(reply, ErrorReply) and not isinstance(error_of(reply), RedisRedirect):
            refused = refused or reply
        uses.append(sign * reply if isinstance(reply, int) else None)
    return uses if refused is None else refused
