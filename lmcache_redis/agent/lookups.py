# SPDX-License-Identifier: Apache-2.0
"""Lookups: which leading chunks of a prompt are cached, for every rank of the scheduler's engine.

    waiting for workers that register ──all ranks──▶ looking up ──▶ answered
                    └──────────not soon: a miss─────── ▲ ─│ ───────▶ answered
                             waiting for what is being stored

Workers are waited for while they are expected, and no longer than the engine would compute. So are
chunks that another engine is said to be storing (`cache.awaiting`): the lookup begins again after a
pause, in which it has pinned nothing. The chunks of a hit are pinned for the request's session. A
lookup that is cancelled is a miss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.peers import Peer, Registration, Reply
from lmcache_redis.agent.sessions import FirstMiss, HitLoad, PartKey, PastLookup, Session
from lmcache_redis.cache.awaiting import AwaitedChunks
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.threads import Action
from lmcache_redis.chunks.names import ChunkForm, PartNames
from lmcache_redis.tier_kinds import HOST

logger = logging.getLogger(__name__)

_JOIN_POLL_S = 0.01
# Of a lookup's deadline: for the wait for what is being stored. The rest is for its load.
_AWAITING = 0.5


class LookupJob:
    """One lookup of a scheduler, from the question to the answer. Owned by the loop thread.

    remote: the names of the parts in ``question.remote``. At least one chunk is looked up.
    """

    def __init__(
        self,
        agent: Agent,
        peer: Peer,
        question: m.Lookup,
        remote: Sequence[PartNames],
        reply: Reply,
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._question = question
        self._remote = remote
        self._reply = reply
        self._now = agent.loop.now
        self._started_s = self._now()
        self._deadline_s = self._started_s + agent.config.lookup_deadline_s
        self._compare_only = False
        stored = min(question.stored_chunks, len(question.hashes))
        until_s = self._started_s + _AWAITING * agent.config.lookup_deadline_s
        self._awaited = AwaitedChunks(peer.computing, stored, until_s)
        self._levels: dict[int, int] = {}  # the tiers of chunks that came before the last look
        self._tenant = agent.peers.tenants.shown(question.tenant)
        self._chunk_tokens = agent.config.chunk_size_tokens

    def start(self) -> None:
        ranks = self._agent.peers.ranks(self._peer)
        if ranks is None and not self._may_wait():
            self._miss_without_ranks()
            return
        key = self._peer.engine_id, self._question.request_id
        session = self._agent.sessions.open(key, self._now())
        if session.cancel_lookup is not None:
            session.cancel_lookup()
            session.cancel_lookup = None
        self._go_on(session, ranks)

    def _go_on(self, session: Session, ranks: Sequence[Registration] | None) -> None:
        if ranks is not None:
            if self._awaited.since_s is None:
                self._started_s = self._now()
            self._look_up(session, ranks)
        elif self._may_wait():
            timer = self._agent.loop.after(_JOIN_POLL_S, partial(self._look_again, session))
            session.cancel_lookup = partial(self._cancel, timer.cancel)
        else:
            self._miss_without_ranks()

    def _look_again(self, session: Session) -> None:
        session.cancel_lookup = None
        self._go_on(session, self._agent.peers.ranks(self._peer))

    def _may_wait(self) -> bool:
        """Whether the missing workers are expected in time."""
        question = self._question
        compute_s = len(question.hashes) * self._chunk_tokens * question.token_s or math.inf
        until_s = min(self._deadline_s, self._started_s + compute_s)
        return self._now() < min(until_s, self._agent.peers.joined_by_s(self._peer))

    def _miss_without_ranks(self) -> None:
        if self._agent.peers.layouts_differ(self._peer):
            self._miss("layouts_differ")
            if not self._peer.warned:
                self._peer.warned = True
                logger.warning(
                    "lookups of model %s miss: workers with different layouts are registered as "
                    "one rank of its engine: give the scheduler and the workers of each engine one "
                    "engine_id that no other engine has",
                    self._peer.hello.model_name,
                )
        elif self._agent.peers.is_mapping(self._peer):
            self._agent.cache.metrics.count("miss_mapping", len(self._question.hashes))
            self._miss("mapping")
        else:
            self._miss("not_registered")

    def _cancel(self, cancel: Action) -> None:
        cancel()
        # Every question is answered: whoever asked would keep what waits for the answer.
        self._reply(m.LookupResult(0, 0))

    def _miss(self, reason: str) -> None:
        self._reply(m.LookupResult(0, 0, compare_only=self._compare_only))
        self._keep(reason)

    def _look_up(self, session: Session, ranks: Sequence[Registration]) -> None:
        question, hashes = self._question, self._question.hashes
        self._chunk_tokens = chunk_tokens(self._agent, ranks)
        forms, users = shared_rows(ranks, len(hashes[0]))
        layouts = [*(form.fingerprint for form in forms), *(p.fingerprint for p in question.remote)]
        self._compare_only = not self._agent.trust.allows(layouts, hashes[0])
        if self._compare_only and question.first_chunk:
            # What was computed behind a local prefix is not compared.
            self._miss("distrusted")
            return
        request = LookupRequest(
            forms,
            hashes,
            self._deadline_s,
            question.first_chunk,
            self._chunk_tokens,
            remote=self._elsewhere(ranks),
            computing=self._peer.computing,
        )
        found = partial(self._found, session, users, forms)
        lookup = PrefixLookup(self._agent.cache, request, found)
        session.positions = {each: question.first_chunk + n for n, each in enumerate(hashes)}
        session.stems = [form.stem(len(hashes[0])) for form in forms]
        # The session takes over the pins, and cancels the lookup if it ends before.
        session.cancel_lookup = partial(self._cancel, lookup.cancel)
        lookup.start()
        if (sights := self._agent.sessions.sights) is not None:
            named, model_name = (*question.before, *hashes), self._peer.hello.model_name
            delay_s = max(each.write_delay_s for each in ranks)
            self._write_behind(forms, sights.see(session.key, model_name, named), delay_s)

    def _write_behind(
        self, forms: Sequence[ChunkForm], hashes: Sequence[bytes], delay_s: float
    ) -> None:
        """Those in the host pool that were held back, because too few requests had named them."""
        pool, tenants = self._agent.cache.pool, self._agent.peers.tenants
        for key in (form.key(each) for each in hashes for form in forms):
            entry = pool.get(key)
            if entry is not None and entry.is_held_back:
                entry.is_held_back = False
                entry.tenant = tenants.payer(entry.tenant, self._tenant)
                self._agent.cache.write_behind(entry, delay_s)

    def _elsewhere(self, ranks: Sequence[Registration]) -> list[PartNames]:
        here = {registration.worker_id for registration in ranks}
        hash_bytes = len(self._question.hashes[0])
        pairs = zip(self._remote, self._question.remote, strict=True)
        stems = {
            names.stem(hash_bytes): names for names, each in pairs if each.worker_id not in here
        }
        return [*stems.values()]

    def _found(
        self,
        session: Session,
        users: Sequence[Sequence[PartKey]],
        forms: Sequence[ChunkForm],
        found: PrefixLookup,
    ) -> None:
        self._levels |= found.parts.levels()
        if pause_s := self._pause_s(found):
            found.missed.clear()  # they may come
            timer = self._agent.loop.after(pause_s, partial(self._look_again, session))
            session.cancel_lookup = partial(self._cancel, timer.cancel)
            return
        tiers = tier_letters(found.bound, self._levels, letters_of(self._agent.cache))
        # First, because the engine is waiting.
        self._reply(m.LookupResult(0, found.bound, tiers, self._compare_only))
        loaded_chunks = 0 if self._compare_only else found.bound
        tokens = (len(self._question.hashes) - loaded_chunks) * self._chunk_tokens
        self._peer.computing.answered(self._question.request_id, tokens, self._now())
        took_s = self._now() - self._started_s
        self._count(found, tiers, took_s)
        self._note(found, tiers, took_s, forms)
        session.load = None
        if found.bound and not self._compare_only:
            workers = {worker_id for row in users for worker_id, _ in row}
            session.load = HitLoad(
                workers,
                self._question.first_chunk,
                self._chunk_tokens,
                self._question.token_s,
                waited_s=took_s,
            )
        pool, hashes = self._agent.cache.pool, self._question.hashes
        tenants = self._agent.peers.tenants
        for (chunk, row), entry in found.parts.take().items():
            entry.tenant = tenants.payer(entry.tenant, self._tenant)  # if it is written again
            first, *others = users[row]
            for part in others:
                pool.pin(entry)
                session.hold(hashes[chunk], part, entry)
            session.hold(hashes[chunk], first, entry)
            if pool.on_change is not None:
                pool.seen(None, (entry.key,))
        session.cancel_lookup = None

    def _pause_s(self, found: PrefixLookup) -> float:
        """How long to wait for what another engine is storing; 0.0: not, or no longer."""
        rate = self._agent.cache.rates[-1].per_second() if self._agent.cache.rates else 0.0
        # The load that was to show the rate may have missed a share.
        is_absent = found.end.counter == "miss_absent" or (
            found.end.counter == "miss_slower" and not rate
        )
        if self._compare_only or not is_absent:
            return 0.0
        return self._awaited.pause_s(found.bound, self._chunk_tokens, self._now())

    def _note(
        self, found: PrefixLookup, tiers: str, took_s: float, forms: Sequence[ChunkForm]
    ) -> None:
        reason, words, missed = "", sorted(found.end.reasons), b""
        if found.bound < len(self._question.hashes):
            counter = found.end.counter
            reason = counter.removeprefix("miss_")
            missed = self._question.hashes[found.bound]
            if counter == "miss_deadline" or self._agent.cache.is_failure(counter):
                states = [tier.state for tier in self._agent.cache.tiers]
                errors = [state.read_error for state in states if state.up]
                words += [error.text for error in errors if error is not None]
                words += [state.reason for state in states if state.reason not in ("", *words)]
            if reason == "absent" and self._was_held_back(missed):
                words.append("it was seen before, but too seldom to be written (--store-after)")
            if reason == "absent" and self._awaited.since_s is not None:
                waited_s = self._now() - self._awaited.since_s
                words.append(f"another engine was to store it, and had not after {waited_s:.2f} s")
            if reason == "absent" and len(forms) > 1 and found.parts.has_some_of(found.bound):
                reason = "in_part"
        self._keep(
            reason, words, missed,
            took_s=took_s,
            found_chunks=found.bound,
            hits={m.TIER_NAMES[each]: tiers.count(each) for each in sorted(set(tiers))},
            compare_only=self._compare_only,
            layouts=tuple(form.fingerprint.hex() for form in forms),
            kv_ranks=tuple(form.kv_rank for form in forms),
            bet=None if found.bet is None else found.bet._asdict(),
        )  # fmt: skip

    def _was_held_back(self, missed: bytes) -> bool:
        """Before this request, which has named it too."""
        sights = self._agent.sessions.sights
        if sights is None:
            return False
        return 1 < sights.count(self._peer.hello.model_name, missed) <= sights.store_after

    def _keep(
        self, reason: str, because: Sequence[str] = (), missed: bytes = b"", **found: Any
    ) -> None:
        """Keeps the lookup for `lmcache-redis why`.

        reason, because, missed: of its first miss; "" if there was none. found: fields of
        `PastLookup`.
        """
        question, history = self._question, self._agent.sessions.history
        past = history.request((self._peer.engine_id, question.request_id))
        past.tenant = self._tenant
        past.lookups += 1
        past.lookup = PastLookup(
            model=self._peer.hello.model_name,
            first_chunk=question.first_chunk,
            asked_chunks=len(question.hashes),
            chunk_tokens=self._chunk_tokens,
            **found,
        )
        if reason:
            chunk = question.first_chunk + past.lookup.found_chunks
            token = chunk * self._chunk_tokens
            past.lookup.first_miss = FirstMiss(chunk, token, reason, tuple(because), missed.hex())

    def _count(self, found: PrefixLookup, tiers: str, took_s: float) -> None:
        metrics, chunks = self._agent.cache.metrics, len(self._question.hashes)
        metrics.count("lookups")
        metrics.count("lookup_chunks", chunks)
        for kind in (HOST, *self._agent.cache.kinds):
            metrics.count(kind.hits, tiers.count(kind.letter))
        metrics.count("awaited_chunks", self._awaited.came(found.bound))
        metrics.observe("lookup_seconds", took_s)
        if found.bound:
            metrics.observe("hit_chunks", found.bound)
        for use in self._agent.peers.uses_of(self._peer.hello.model_name, self._tenant):
            use.lookups += 1
            use.lookup_tokens += chunks * self._chunk_tokens
            use.hit_tokens += found.bound * self._chunk_tokens


def chunk_tokens(agent: Agent, ranks: Sequence[Registration]) -> int:
    """Tokens of the engine's chunks; of most engines' if none of its workers is registered."""
    return ranks[0].chunk_tokens if ranks else agent.config.chunk_size_tokens


def letters_of(cache: Cache) -> tuple[str, ...]:
    """What messages call the cache's tiers, see `messages.TIER_NAMES`."""
    return tuple(kind.letter for kind in cache.kinds)


def tier_letters(bound: int, levels: Mapping[int, int], letters: Sequence[str]) -> str:
    """See `messages.LookupResult`. levels: the tiers of chunks that were not in the host pool.

    letters: of the cache's tiers.
    """
    return "".join(
        letters[levels[chunk]] if chunk in levels else HOST.letter for chunk in range(bound)
    )


def shared_rows(
    ranks: Sequence[Registration], hash_bytes: int
) -> tuple[list[ChunkForm], list[list[PartKey]]]:
    """The rows of a lookup: the form of each, and the workers and groups whose parts it names.

    Ranks that hold equal bytes share their parts: each is looked up and loaded once.
    """
    forms: dict[bytes, ChunkForm] = {}
    users: dict[bytes, list[PartKey]] = {}
    for registration in ranks:
        for number, form in enumerate(registration.forms):
            stem = form.stem(hash_bytes)
            forms.setdefault(stem, form)
            users.setdefault(stem, []).append((registration.worker_id, number))
    return [*forms.values()], [*users.values()]
