"""The agent's handlers: one for each kind of question, in a table by type.

A question of a tool needs no HELLO. All others are of a peer. HELLO itself is `service`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, status_report
from lmcache_redis.agent.comparing import CompareJob
from lmcache_redis.agent.explaining import Explanations
from lmcache_redis.agent.jobs import CopyJob, CopyRequest
from lmcache_redis.agent.lookups import LookupJob, note_miss
from lmcache_redis.agent.peers import Peer, Registration, Reply
from lmcache_redis.agent.recording import TraceRecorder
from lmcache_redis.agent.registering import Registering
from lmcache_redis.agent.retrieves import RetrieveJob
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.agent.watching import Watches
from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.names import ChunkNames, PartNames
from lmcache_redis.errors import DeviceError, FormatError, WireError

logger = logging.getLogger(__name__)

_JOBS: Mapping[type, type[CopyJob]] = {
    m.Store: StoreJob,
    m.Compare: CompareJob,
    m.Retrieve: RetrieveJob,
}


class Handlers:
    """Validates questions and answers them, or starts jobs that do. Owned by the loop thread.

    is_stopping: lookups are misses and stores are dropped.
    """

    def __init__(self, agent: Agent, recorder: TraceRecorder | None = None) -> None:
        self.is_stopping = False
        self._agent = agent
        explanations = Explanations(agent)
        self._recorder = recorder
        self._registering = Registering(agent)
        self._watches = Watches(agent)
        self._of_tools: Mapping[type, Callable[[Any, Reply], None]] = {
            m.Ping: lambda question, reply: reply(
                m.Pong(0, os.getpid(), __version__, self._registering.is_mapping)
            ),
            m.GetChunkSize: lambda question, reply: reply(
                m.ChunkSize(0, agent.config.chunk_size_tokens)
            ),
            m.Status: self._status,
            m.Why: explanations.why,
            m.Layouts: explanations.layouts,
            m.Trust: lambda question, reply: reply(m.Done(0, agent.trust.restore())),
        }
        self._of_peers: Mapping[type, Callable[[Peer, Any, Reply], None]] = {
            m.RegisterKVCache: self._registering.register,
            m.UnregisterKVCache: self._unregister,
            m.Lookup: self._lookup,
            m.Watch: self._watch,
            m.Store: self._copy,
            m.Compare: self._copy,
            m.Retrieve: self._copy,
            m.ReleaseLocks: self._release,
            m.EndSession: self._end_session,
            m.Goodbye: lambda peer, question, reply: self.forget(peer, "it said goodbye"),
            m.Clear: self._clear,
        }

    def answer(self, peer: Peer | None, question: m.Question, reply: Reply) -> None:
        """Answers, at once or when the job that the question starts has ended.

        peer: None if the connection has sent no HELLO. Raises ``LMCacheRedisError``.
        """
        of_tools = self._of_tools.get(type(question))
        if of_tools is not None:
            of_tools(question, reply)
        elif peer is None:
            reply(m.Failure(0, m.UNKNOWN_PEER, "say HELLO first"))
        else:
            self._of_peers[type(question)](peer, question, reply)

    def forget(self, peer: Peer, why: str) -> None:
        """Drops a peer and its registration; for a scheduler, also the sessions of its engine."""
        self._agent.peers.remove(peer)
        self._watches.forget(peer)
        self._registering.unregister(peer, why)
        if peer.hello.worker_id is None:
            for session in self._agent.sessions:
                if session.key[0] == peer.engine_id:
                    self._agent.sessions.end(session)

    def _status(self, question: m.Status, reply: Reply) -> None:
        reply(m.StatusReport(0, msgspec.json.encode(status_report(self._agent))))

    def _unregister(self, peer: Peer, question: m.UnregisterKVCache, reply: Reply) -> None:
        def unregister() -> None:
            self._registering.unregister(peer, "it asked for that")
            self._registering.when_unmapped(peer, lambda: reply(m.Done(0)))

        self._registering.when_mapped(peer, unregister)

    def _lookup(self, peer: Peer, question: m.Lookup, reply: Reply) -> None:
        if self._agent.peers.layouts_differ(peer):
            _warn_of_layouts(peer)
            reply(m.LookupResult(0, 0))
            note_miss(self._agent, peer, question, "layouts_differ")
            return
        _check_hashes(question.hashes)
        remote = self._names(peer, question.remote)
        peer.elsewhere = frozenset(each.worker_id for each in question.remote)
        peer.computing.token_s = question.token_s
        if not question.hashes or self.is_stopping:
            reply(m.LookupResult(0, 0))
            if question.hashes:
                note_miss(self._agent, peer, question, "stopping")
            return
        if self._recorder is not None:
            reply = self._recorder.looked_up(peer, question, reply)
        LookupJob(self._agent, peer, question, remote, reply).start()

    def _watch(self, peer: Peer, question: m.Watch, reply: Reply) -> None:
        self._watches.watch(peer, question.parts, self._names(peer, question.parts), reply)

    def _copy(self, peer: Peer, question: m.Retrieve | m.Store, reply: Reply) -> None:
        registration, hashes = peer.registration, question.hashes
        if registration is None:
            raise DeviceError("no KV cache is registered on this connection")
        _check_hashes(hashes)
        check_blocks(registration, question)
        if self.is_stopping and isinstance(question, m.Store):
            self._agent.cache.metrics.count("drop_shutdown", len(hashes))
            reply(m.StoreResult(0, 0, 0, len(hashes)))
            return
        if isinstance(question, m.Retrieve) and not self._may_load(registration, hashes):
            reply(m.RetrieveResult(0, tuple(range(len(hashes)))))
            parts = self._agent.sessions.history.parts_of((peer.engine_id, question.request_id))
            parts.failed += len(hashes)
            parts.add_reasons(("a canary has found other KV in this layout",))
            return
        if self._recorder is not None and isinstance(question, m.Store):
            self._recorder.stored(question, registration.groups[question.group].form)
        session = self._agent.session_of(peer, question.request_id, for_lookup=False)
        job = _JOBS[type(question)]
        job(self._agent, CopyRequest(session, registration, question, reply)).start()

    def _may_load(self, registration: Registration, hashes: Sequence[bytes]) -> bool:
        fingerprints = [group.form.fingerprint for group in registration.groups]
        return not hashes or self._agent.trust.allows(fingerprints, hashes[0])

    def _release(self, peer: Peer, question: m.ReleaseLocks, reply: Reply) -> None:
        session = self._agent.sessions.get((peer.engine_id, question.request_id))
        released = 0 if session is None else sum(map(session.release, question.hashes))
        reply(m.Done(0, released))

    def _end_session(self, peer: Peer, question: m.EndSession, reply: Reply) -> None:
        session = self._agent.sessions.get((peer.engine_id, question.request_id))
        if session is not None:
            self._agent.cache.metrics.count("sessions_ended")
            self._agent.sessions.end(session)
        reply(m.Done(0))

    def _clear(self, peer: Peer, question: m.Clear, reply: Reply) -> None:
        """Removes chunks of an epoch that the engine has ended and will never ask for again."""
        prefixes: set[bytes] = set()
        epoch = question.epoch
        registrations = self._agent.peers.registrations(peer)
        forms = [group.form for each in registrations for group in each.groups]
        for each in [*forms, *self._names(peer, question.remote)]:
            if epoch is None:
                prefixes.add(each.names.common)
            else:
                sizes = m.HASH_BYTES_OF_AN_EPOCH
                prefixes |= {each.stem(len(epoch) + nbytes) + epoch for nbytes in sizes}
        self._agent.cache.metrics.count("clears")
        reply(m.Done(0, self._agent.cache.clear(sorted(prefixes))))

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


def _warn_of_layouts(scheduler: Peer) -> None:
    """Says once why all lookups of an unnamed engine's scheduler are misses."""
    if not scheduler.warned:
        scheduler.warned = True
        logger.warning(
            "lookups of model %s miss: workers with different layouts are registered, and neither "
            "they nor the scheduler name their engines: give those of each engine one engine_id",
            scheduler.hello.model_name,
        )


def _check_hashes(hashes: Sequence[bytes]) -> None:
    if len(set(map(len, hashes))) > 1:
        raise WireError("chunk hashes of different lengths in one message")


def check_blocks(registration: Registration, question: m.Store | m.Retrieve) -> None:
    group, block_ids, chunks = question.group, question.block_ids, len(question.hashes)
    if group >= len(registration.groups):
        raise WireError(f"group {group} of a worker with {len(registration.groups)} groups")
    expected = chunks * registration.groups[group].blocks_per_part
    if len(block_ids) != expected:
        raise WireError(f"{len(block_ids)} block ids for {chunks} chunks: expected {expected}")
    layout = registration.device.layouts[group]
    if layout.device != "cpu" and question.after is None:
        raise WireError("a copy on a GPU without a ticket: its blocks may still be written")
    num_blocks = layout.num_blocks
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise WireError(f"a block id is outside the {num_blocks} blocks of the KV cache")
