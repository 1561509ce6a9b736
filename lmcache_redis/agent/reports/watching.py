# SPDX-License-Identifier: Apache-2.0
"""What schedulers are told of chunks that come and go, for events to routers.

A WATCH stays open until soon after the first change. Nothing here runs, and the pool notes nothing,
unless a scheduler watches.

While one does, servers tell what they evict and expire, if they may (`resp.removals`). They keep
nothing for who is away, so when a subscription begins, and again if that fails, Redis is asked for
the chunks that schedulers believe to be there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.lookups import letters_of
from lmcache_redis.agent.peers import Peer, Reply
from lmcache_redis.cache.threads import posting
from lmcache_redis.chunks.keys import hash_in, hash_tag_bytes
from lmcache_redis.chunks.names import PartNames, ShareKeys
from lmcache_redis.tier_kinds import HOST
from lmcache_redis.tiers import CallOutcome, ExistsResult

logger = logging.getLogger(__name__)

MAX_CHANGES = 1 << 16
# Of the names of chunks: without an epoch, and with one.
_HASH_BYTES = (*m.HASH_BYTES_OF_AN_EPOCH, *(8 + nbytes for nbytes in m.HASH_BYTES_OF_AN_EPOCH))
# One answer collects changes for this long, and holds at most this many.
_COLLECT_S = 0.02
_CHANGES_PER_ANSWER = 1 << 14
# Of the chunks that Redis has, as schedulers were told. The oldest beyond are told as removed.
_MOST_FOLLOWED = 1 << 18
_CHUNKS_PER_QUESTION = 1 << 12
_QUESTION_S = 5.0


class Journal:
    """What one scheduler has not been told yet: the last change of each part in each tier.

    parts: whose changes; their indices name them.
    limit: of the changes kept. Beyond, all are dropped, and the next `take` says so.
    """

    def __init__(self, parts: Sequence[PartNames], limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._lost = False
        # By part, tier and hash of the chunk, in the order in which they came.
        self._changes: dict[tuple[int, str, bytes], bool] = {}
        # A key does not say where its hash begins, so every length is tried.
        self._parts: Mapping[int, Mapping[bytes, int]] = {
            nbytes: {part.stem(nbytes): number for number, part in enumerate(parts)}
            for nbytes in _HASH_BYTES
        }

    def __len__(self) -> int:
        return len(self._changes) + self._lost

    def note(self, key: bytes, tier: str, there: bool) -> None:
        """A chunk is in a tier, or not any more. Ignores chunks of others."""
        for nbytes, parts in self._parts.items():
            part = parts.get(key[: -hash_tag_bytes(nbytes)])
            if part is not None:
                place = (part, tier, hash_in(key, nbytes))
                self._changes.pop(place, None)
                self._changes[place] = there
                break
        if len(self._changes) > self._limit:
            self._changes.clear()
            self._lost = True

    def take(self, limit: int) -> tuple[tuple[m.Change, ...], bool]:
        """The oldest changes, at most ``limit``, and whether earlier ones were dropped."""
        taken = [*islice(self._changes.items(), limit)]
        for place, _ in taken:
            del self._changes[place]
        lost, self._lost = self._lost, False
        runs = groupby(taken, key=lambda each: (each[0][0], each[0][1], each[1]))
        changes = tuple(
            m.Change(part, tier, there, tuple(place[2] for place, _ in places))
            for (part, tier, there), places in runs
        )
        return changes, lost


@dataclass(eq=False)
class _OpenWatch:
    parts: Sequence[m.RemoteParts]
    journal: Journal
    reply: Reply | None = None  # of the question that is open
    is_due: bool = False  # its answer is on a timer


class Watches:
    """The watches of each peer. Owned by the loop thread."""

    def __init__(self, agent: Agent) -> None:
        self._loop = agent.loop
        self._pool = agent.cache.pool
        self._disk = agent.disk
        self._redis = agent.redis
        self._plane = agent.plane
        self._keys = ShareKeys(agent.config.key_prefix)
        self._watches: dict[Peer, _OpenWatch] = {}
        self._letters = letters_of(agent.cache)
        self._levels: dict[object, int] = {
            tier: level for level, tier in enumerate(agent.cache.tiers)
        }
        self._not_known: set[bytes] = set()  # of these, to be asked about again
        self._in_redis: dict[bytes, None] = {}  # as schedulers were told, the oldest first

    def watch(
        self,
        peer: Peer,
        parts: Sequence[m.RemoteParts],
        names: Sequence[PartNames],
        reply: Reply,
    ) -> None:
        """Answers when there are changes. names: of ``parts``."""
        watch = self._watches.get(peer)
        if watch is not None and watch.reply is not None:
            watch.reply(m.Changes(0, ()))  # a question is open until the next one
            watch.reply = None
        if watch is None or watch.parts != parts:
            watch = self._watches[peer] = _OpenWatch(parts, Journal(names))
            self._listen()
        watch.reply = reply
        self._answer_soon(watch)

    def forget(self, peer: Peer) -> None:
        if self._watches.pop(peer, None) is not None:
            self._listen()

    def _listen(self) -> None:
        is_on = bool(self._watches)
        self._pool.on_change = self._changed if is_on else None
        if self._disk is not None:
            self._disk.store.on_evicted = self._evicted_from_disk if is_on else None
        if is_on:
            self._plane.removals.listen(
                lambda keys, certain: self._loop.post(
                    partial(self._removed_from_redis if certain else self._ask_redis, keys)
                ),
                lambda: self._loop.post(lambda: self._ask_redis([*self._in_redis])),
            )
        else:
            self._plane.removals.stop()
            self._in_redis.clear()

    def _evicted_from_disk(self, keys: Sequence[bytes]) -> None:
        # On a thread of the disk tier, which is the first.
        gone = [each for key in keys for each in self._keys.holders(key)]
        self._loop.post(partial(self._pool.seen, 0, gone, there=False))

    def _removed_from_redis(self, keys: Iterable[bytes]) -> None:
        """keys: of chunks, or of shares of them."""
        followed = self._followed(keys)
        self._pool.seen(self._levels[self._redis], followed, there=False)

    def _ask_redis(self, keys: Sequence[bytes]) -> None:
        keys = self._followed(keys)
        first, rest = keys[:_CHUNKS_PER_QUESTION], keys[_CHUNKS_PER_QUESTION:]
        if not first or not self._watches:
            return

        def answered(result: ExistsResult) -> None:
            if result.outcome is not CallOutcome.DONE:
                self._ask_later(keys)
                return
            pairs = [*zip(first, result.present, strict=True)]
            self._removed_from_redis([key for key, there in pairs if there is False])
            self._ask_later([key for key, there in pairs if there is None])
            self._ask_redis(rest)

        self._redis.exist_whole(
            first, self._loop.now() + _QUESTION_S, posting(self._loop, answered)
        )

    def _followed(self, keys: Iterable[bytes]) -> list[bytes]:
        """The chunks that have these keys, or shares with them."""
        chunks = (each for key in keys for each in self._keys.holders(key))
        return [key for key in dict.fromkeys(chunks) if key in self._in_redis]

    def _ask_later(self, keys: Sequence[bytes]) -> None:
        """About what was not known, all at once."""
        if keys and not self._not_known:
            self._loop.after(_QUESTION_S, self._ask_again)
        self._not_known.update(keys)

    def _ask_again(self) -> None:
        keys, self._not_known = [*self._not_known], set()
        self._ask_redis(keys)

    def _changed(self, key: bytes, tier: int | None, there: bool) -> None:
        letter = HOST.letter if tier is None else self._letters[tier]
        try:
            if tier == self._levels[self._redis]:
                self._follow(key, there)
                if len(self._in_redis) > _MOST_FOLLOWED:
                    oldest = next(iter(self._in_redis))
                    self._pool.seen(self._levels[self._redis], (oldest,), there=False)
            for watch in self._watches.values():
                watch.journal.note(key, letter, there)
                self._answer_soon(watch)
        except Exception:
            # Our own bug. The pool is in the middle of a change, which must not fail.
            logger.exception("changes of chunks are no longer reported")
            self._pool.on_change = None

    def _follow(self, key: bytes, there: bool) -> None:
        self._in_redis.pop(key, None)
        if there:
            self._in_redis[key] = None

    def _answer_soon(self, watch: _OpenWatch) -> None:
        if len(watch.journal) and watch.reply is not None and not watch.is_due:
            watch.is_due = True
            self._loop.after(_COLLECT_S, partial(self._answer, watch))

    def _answer(self, watch: _OpenWatch) -> None:
        watch.is_due = False
        if watch.reply is not None:
            reply, watch.reply = watch.reply, None
            reply(m.Changes(0, *watch.journal.take(_CHANGES_PER_ANSWER)))
