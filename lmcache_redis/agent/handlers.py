"""The agent's handlers: one for each kind of question."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, status_report
from lmcache_redis.agent.comparing import CompareJob
from lmcache_redis.agent.peers import MAX_CHUNKS, Peer, Registration, Session
from lmcache_redis.agent.registering import Registering
from lmcache_redis.agent.transfers import CopyJob, Reply, RetrieveJob, StoreJob, because
from lmcache_redis.agent.warming import Warming
from lmcache_redis.agent.watching import Watches
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.chunks.keys import MAX_HASH_BYTES, IPCCacheEngineKey, hash_chunks
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, PartNames
from lmcache_redis.errors import DeviceError, FormatError, WireError

logger = logging.getLogger(__name__)

_JOIN_POLL_S = 0.01
_JOBS: Mapping[type, type[CopyJob]] = {
    m.Store: StoreJob,
    m.Compare: CompareJob,
    m.Retrieve: RetrieveJob,
}


class Handlers:
    """Validates questions and answers them, or starts jobs that do. Owned by the loop thread.

    is_stopping: lookups are misses and stores are dropped.
    """

    def __init__(self, agent: Agent) -> None:
        self.is_stopping = False
        self._agent = agent
        self._cache = agent.cache
        self._sessions = agent.sessions
        self._metrics = agent.cache.metrics
        self._peers = agent.peers
        self._letters = agent.tier_letters
        self._registering = Registering(agent)
        self._warming = Warming(agent)
        self._watches = Watches(agent)

    def answer_anyone(self, question: m.Question, reply: Reply) -> bool:
        """Answers a question that needs no HELLO, or begins to; returns False for any other."""
        if isinstance(question, m.Ping):
            reply(m.Pong(0, os.getpid(), __version__))
        elif isinstance(question, m.GetChunkSize):
            reply(m.ChunkSize(0, self._agent.config.chunk_size_tokens))
        elif isinstance(question, m.Status):
            report = status_report(self._agent)
            reply(m.StatusReport(0, msgspec.json.encode(report)))
        elif isinstance(question, m.Warm):
            self._warming.warm(question, reply)
        elif isinstance(question, m.Trust):
            reply(m.Done(0, self._agent.trust.restore()))
        else:
            return False
        return True

    def answer_peer(self, peer: Peer, question: m.Question, reply: Reply) -> None:
        """Answers a peer, at once or when the job that the question starts has ended."""
        if isinstance(question, m.Lookup):
            self._lookup(peer, question, reply)
        elif isinstance(question, (m.Retrieve, m.Store)):
            self._copy(peer, question, reply)
        elif isinstance(question, m.RegisterKVCache):
            self._registering.register(peer, question, reply)
        elif isinstance(question, m.UnregisterKVCache):
            self._registering.unregister(peer, "it asked for that")
            self._registering.when_unmapped(peer, lambda: reply(m.Done(0)))
        elif isinstance(question, m.ReleaseLocks):
            self._release(peer, question, reply)
        elif isinstance(question, m.EndSession):
            session = self._sessions.get((peer.engine_id, question.request_id))
            if session is not None:
                self._metrics.count("sessions_ended")
                self._sessions.end(session)
            reply(m.Done(0))
        elif isinstance(question, m.Watch):
            self._watches.watch(peer, question.parts, self._names(peer, question.parts), reply)
        elif isinstance(question, m.Goodbye):
            self.forget(peer, "it said goodbye")
        elif isinstance(question, m.Clear):
            self._clear(peer, question, reply)

    def forget(self, peer: Peer, why: str) -> None:
        """Drops a peer and its registration; for a scheduler, also the sessions of its engine."""
        self._peers.remove(peer)
        self._watches.forget(peer)
        self._registering.unregister(peer, why)
        if peer.hello.worker_id is None:
            for session in self._sessions:
                if session.key[0] == peer.engine_id:
                    self._sessions.end(session)

    # Jobs

    def _lookup(self, peer: Peer, question: m.Lookup, reply: Reply) -> None:
        if self._peers.layouts_differ(peer):
            _warn_of_layouts(peer)
            reply(m.LookupResult(0, 0))
            return
        hashes = self._hashes(peer, question.chunks)
        if not 0 <= question.first_chunk < MAX_CHUNKS:
            raise WireError(f"a lookup from chunk number {question.first_chunk} on")
        remote = self._names(peer, question.remote)
        peer.elsewhere = frozenset(each.worker_id for each in question.remote)
        peer.computing.token_s = question.token_s
        if not hashes or self.is_stopping:
            reply(m.LookupResult(0, 0))
            return
        deadline_s = time.monotonic() + self._agent.config.lookup_deadline_s
        self._join_lookup(peer, question, hashes, remote, deadline_s, reply)

    def _join_lookup(
        self,
        peer: Peer,
        question: m.Lookup,
        hashes: Sequence[bytes],
        remote: Sequence[PartNames],
        deadline_s: float,
        reply: Reply,
    ) -> None:
        """Begins a lookup, at once or when the registrations in progress have ended."""
        now_s = time.monotonic()
        ranks = self._peers.ranks(peer)
        if ranks is None and (now_s >= deadline_s or not self._peers.joining(peer, now_s)):
            reply(m.LookupResult(0, 0))
            return
        session = self._session(peer, question.request_id, for_lookup=True)
        if session.cancel_lookup is not None:
            session.cancel_lookup()
        if ranks is None:
            again = partial(self._join_lookup, peer, question, hashes, remote, deadline_s, reply)
            session.cancel_lookup = self._agent.loop.after(_JOIN_POLL_S, again).cancel
            return
        here = {registration.worker_id for registration in ranks}
        stems = {
            names.stem(len(hashes[0])): names
            for names, each in zip(remote, question.remote, strict=True)
            if each.worker_id not in here
        }
        forms, rows = _shared_rows(ranks, len(hashes[0]))
        layouts = [*(each.fingerprint for each in forms), *(p.fingerprint for p in question.remote)]
        compare_only = not self._agent.trust.allows(layouts, hashes[0])
        if compare_only and question.first_chunk:
            # What was computed behind a local prefix is not compared.
            reply(m.LookupResult(0, 0, compare_only=True))
            return
        chunk_tokens = self._chunk_tokens(peer)

        def answer(found: PrefixLookup) -> None:
            tiers, metrics = self._tiers(found), self._metrics
            reply(
                m.LookupResult(0, found.bound, tiers, compare_only)
            )  # first, because the engine is waiting
            from_redis, from_disk = tiers.count("r"), tiers.count("d")
            metrics.count("lookups")
            metrics.count("lookup_chunks", len(hashes))
            metrics.count("hit_chunks_redis", from_redis)
            metrics.count("hit_chunks_disk", from_disk)
            metrics.count("hit_chunks_pool", found.bound - from_redis - from_disk)
            took_s = time.monotonic() - now_s
            metrics.observe("lookup_seconds", took_s)
            if found.bound:
                metrics.observe("hit_chunks", found.bound)
            use = self._peers.use_of(peer.hello.model_name)
            use.lookups += 1
            use.lookup_tokens += len(hashes) * chunk_tokens
            use.hit_tokens += found.bound * chunk_tokens
            logger.debug(
                "request %s: %d of %d chunks hit (%d loaded from Redis, %d from disk) in %.1f ms%s",
                question.request_id, found.bound, len(hashes), from_redis, from_disk, took_s * 1e3,
                because(found.reasons),
            )  # fmt: skip
            for (chunk, row), entry in found.take().items():
                for worker_id, number in rows[row][1:]:
                    self._cache.pool.pin(entry)
                    session.hold((worker_id, number, hashes[chunk]), entry)
                session.hold((*rows[row][0], hashes[chunk]), entry)
                if self._cache.pool.on_change is not None:
                    self._cache.pool.report_again(entry)
            if session.cancel_lookup == found.cancel:
                session.cancel_lookup = None

        lookup = PrefixLookup(
            self._cache,
            forms,
            hashes,
            deadline_s,
            answer,
            first_chunk=question.first_chunk,
            chunk_tokens=chunk_tokens,
            remote=[*stems.values()],
            computing=peer.computing,
        )
        session.positions = {each: question.first_chunk + n for n, each in enumerate(hashes)}
        # The session takes over the pins, and cancels the lookup if it ends before.
        session.cancel_lookup = lookup.cancel
        lookup.start()

    def _tiers(self, found: PrefixLookup) -> str:
        """See `messages.LookupResult`."""
        levels, letters = found.levels(), self._letters
        if not levels:
            return "h" * found.bound
        return "".join(
            letters[levels[chunk]] if chunk in levels else "h" for chunk in range(found.bound)
        )

    def _copy(self, peer: Peer, question: m.Retrieve | m.Store, reply: Reply) -> None:
        registration = peer.registration
        if registration is None:
            raise DeviceError("no KV cache is registered on this connection")
        hashes = self._hashes(peer, question.chunks)
        _check_blocks(registration, hashes, question)
        if self.is_stopping and isinstance(question, m.Store):
            self._metrics.count("drop_shutdown", len(hashes))
            reply(m.StoreResult(0, 0, 0, len(hashes)))
            return
        if isinstance(question, m.Retrieve) and not self._may_load(registration, hashes):
            reply(m.RetrieveResult(0, tuple(range(len(hashes)))))
            return
        session = self._session(peer, question.request_id, for_lookup=False)
        kind = _JOBS[type(question)]
        kind(self._agent, session, registration, hashes, question, reply).start()

    def _may_load(self, registration: Registration, hashes: Sequence[bytes]) -> bool:
        fingerprints = [group.form.fingerprint for group in registration.groups]
        return not hashes or self._agent.trust.allows(fingerprints, hashes[0])

    def _release(self, peer: Peer, question: m.ReleaseLocks, reply: Reply) -> None:
        hashes = self._hashes(peer, question.chunks)
        session = self._sessions.get((peer.engine_id, question.request_id))
        released = 0 if session is None else sum(map(session.release, hashes))
        reply(m.Done(0, released))

    def _clear(self, peer: Peer, question: m.Clear, reply: Reply) -> None:
        """Removes chunks of an epoch that the engine has ended and will never ask for again."""
        prefixes: set[bytes] = set()
        epoch = question.epoch
        registrations = self._peers.registrations(peer)
        forms = [group.form for each in registrations for group in each.groups]
        for each in [*forms, *self._names(peer, question.remote)]:
            if epoch is None:
                prefixes.add(each.names.common)
            else:
                sizes = m.HASH_BYTES_OF_AN_EPOCH
                prefixes |= {each.stem(len(epoch) + nbytes) + epoch for nbytes in sizes}
        self._metrics.count("clears")
        reply(m.Done(0, self._cache.clear(sorted(prefixes))))

    def _names(self, peer: Peer, remote: Sequence[m.RemoteParts]) -> list[PartNames]:
        """The names of parts as a scheduler knows them.

        Raises ``WireError`` if there are no such names.
        """
        prefix, model_name = self._agent.config.key_prefix, peer.hello.model_name
        found = []
        for each in remote:
            names = ChunkNames(each.fingerprint, prefix)
            found.append(PartNames(names, model_name, each.kv_rank, reach=each.reach))
            try:
                found[-1].stem(MAX_HASH_BYTES)
            except FormatError as error:
                raise WireError(f"parts of worker {each.worker_id}: {error}") from error
        return found

    # Checks

    def _session(self, peer: Peer, request_id: str, *, for_lookup: bool) -> Session:
        keys = [(engine_id, request_id) for engine_id in self._peers.engines_of(peer)]
        key = next((key for key in keys if self._sessions.get(key) is not None), keys[-1])
        if self._sessions.get(key) is None:
            self._metrics.count("sessions_opened")
        return self._sessions.open(key, time.monotonic(), for_lookup=for_lookup)

    def _chunk_tokens(self, peer: Peer) -> int:
        """Tokens of the engine's chunks; of most engines' if none of its workers is registered."""
        registered = peer.registration or next(iter(self._peers.registrations(peer)), None)
        return registered.chunk_tokens if registered else self._agent.config.chunk_size_tokens

    def _hashes(self, peer: Peer, chunks: m.ChunkNames) -> Sequence[bytes]:
        """The chunks' hashes. Raises ``WireError`` if the names are inconsistent."""
        key = chunks.tokens
        if key is None:
            if len(set(map(len, chunks.hashes))) > 1:
                raise WireError("chunk hashes of different lengths in one message")
            return chunks.hashes
        if chunks.hashes:
            raise WireError("chunks are named by hashes or by tokens, not by both")
        if key.token_ids is None:
            raise WireError("the key of a message in token mode has no token ids")
        chunk = self._chunk_tokens(peer)
        if key.start % chunk or key.end % chunk:
            raise WireError(f"tokens {key.start} to {key.end} are not whole chunks of {chunk}")
        _check_owner(peer.hello, key)
        hashes = hash_chunks(key.token_ids[: key.end], chunk, salt=key.salt)
        return hashes[key.start // chunk : key.end // chunk]


def _warn_of_layouts(scheduler: Peer) -> None:
    """Says once why all lookups of an unnamed engine's scheduler are misses."""
    if not scheduler.warned:
        scheduler.warned = True
        logger.warning(
            "lookups of model %s miss: workers with different layouts are registered, and neither "
            "they nor the scheduler name their engines: give those of each engine one engine_id",
            scheduler.hello.model_name,
        )


def _shared_rows(
    ranks: Sequence[Registration], hash_bytes: int
) -> tuple[list[ChunkForm], list[list[tuple[int, int]]]]:
    """The rows of a lookup: the form of each, and the workers and groups whose parts it names.

    Ranks that hold equal bytes share their parts: each is looked up and loaded once.
    """
    forms: dict[bytes, ChunkForm] = {}
    users: dict[bytes, list[tuple[int, int]]] = {}
    for registration in ranks:
        for number, group in enumerate(registration.groups):
            stem = group.form.stem(hash_bytes)
            forms.setdefault(stem, group.form)
            users.setdefault(stem, []).append((registration.worker_id, number))
    return [*forms.values()], [*users.values()]


def _check_blocks(
    registration: Registration, hashes: Sequence[bytes], question: m.Store | m.Retrieve
) -> None:
    group, block_ids = question.group, question.block_ids
    if not 0 <= group < len(registration.groups):
        raise WireError(f"group {group} of a worker with {len(registration.groups)} groups")
    expected = len(hashes) * registration.groups[group].blocks_per_part
    if len(block_ids) != expected:
        raise WireError(f"{len(block_ids)} block ids for {len(hashes)} chunks of {expected} blocks")
    num_blocks = registration.device.layouts[group].num_blocks
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise WireError(f"a block id outside the {num_blocks} blocks of the KV cache")
    if isinstance(question, m.Retrieve) and question.skip_first_n_tokens < 0:
        raise WireError("skip_first_n_tokens is negative")


def _check_owner(hello: m.Hello, key: IPCCacheEngineKey) -> None:
    """Raises ``WireError`` unless the key matches the model and the ranks of the HELLO."""
    if key.model_name != hello.model_name:
        raise WireError(f"a key of model {key.model_name!r}, a HELLO of {hello.model_name!r}")
    if key.world_size != hello.world_size:
        raise WireError(f"a key of {key.world_size} ranks, a HELLO of {hello.world_size}")
    if key.worker_id is not None and key.worker_id != hello.worker_id:
        who = "a scheduler" if hello.worker_id is None else f"rank {hello.worker_id}"
        raise WireError(f"a key of rank {key.worker_id}, a HELLO of {who}")
