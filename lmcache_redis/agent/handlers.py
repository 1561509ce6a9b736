# SPDX-License-Identifier: Apache-2.0
"""What becomes of each question: one entry for each kind.

A question of a tool needs no HELLO, all others are of a peer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, status_report
from lmcache_redis.agent.comparing import CompareJob
from lmcache_redis.agent.jobs import CopyJob, RetrieveJob, StoreJob
from lmcache_redis.agent.lookups import LookupJob
from lmcache_redis.agent.peers import Peer, Registration, Reply
from lmcache_redis.agent.registering import Registering
from lmcache_redis.agent.reports.explaining import Explanations
from lmcache_redis.agent.reports.recording import TraceRecorder
from lmcache_redis.agent.reports.watching import Watches
from lmcache_redis.chunks.keys import MAX_HASH_BYTES
from lmcache_redis.chunks.names import ChunkNames, PartNames
from lmcache_redis.errors import DeviceError, FormatError, WireError
from lmcache_redis.tenants import is_sent

logger = logging.getLogger(__name__)


class Handlers:
    """Validates questions and answers them, or starts jobs that do. Owned by the loop thread.

    is_stopping: lookups are misses and stores are dropped.
    """

    def __init__(self, agent: Agent, recorder: TraceRecorder | None = None) -> None:
        self.is_stopping = False
        self._agent = agent
        self._recorder = recorder
        self._registering = Registering(agent)
        self._watches = Watches(agent)
        self._leaving: set[str] = set()  # engines that have unregistered memory on their own
        explanations = Explanations(agent)
        self._of_tools: Mapping[type, Callable[[Any, Reply], None]] = {
            m.Ping: lambda question, reply: self._pong(reply, known=False),
            m.GetChunkSize: lambda question, reply: reply(
                m.ChunkSize(0, agent.config.chunk_size_tokens)
            ),
            m.Status: lambda question, reply: reply(
                m.StatusReport(0, msgspec.json.encode(status_report(agent)))
            ),
            m.Why: explanations.why,
            m.Layouts: explanations.layouts,
            m.Trust: lambda question, reply: reply(m.Done(0, agent.trust.restore())),
        }
        self._of_peers: Mapping[type, Callable[[Peer, Any, Reply], None]] = {
            m.Ping: lambda peer, question, reply: self._pong(reply, known=True),
            m.RegisterKVCache: self._register,
            m.UnregisterKVCache: self._unregister,
            m.Lookup: self._lookup,
            m.Watch: self._watch,
            m.Store: partial(self._copy, StoreJob),
            m.Compare: partial(self._copy, CompareJob),
            m.Retrieve: partial(self._copy, RetrieveJob),
            m.HoldStores: self._hold_stores,
            m.ReleaseLocks: self._release,
            m.EndSession: self._end_session,
            m.Goodbye: lambda peer, question, reply: self.forget(peer, "it said goodbye"),
            m.Clear: self._clear,
        }

    def answer(self, peer: Peer | None, question: m.Question, reply: Reply) -> None:
        """Answers, at once or when the job that the question starts has ended.

        peer: None if the connection has sent no HELLO. Raises ``LMCacheRedisError``.
        """
        of_peers = self._of_peers.get(type(question))
        of_tools = self._of_tools.get(type(question))
        if peer is not None and of_peers is not None:
            of_peers(peer, question, reply)
        elif of_tools is not None:
            of_tools(question, reply)
        else:
            reply(m.Failure(0, m.UNKNOWN_PEER, "say HELLO first"))

    def forget(self, peer: Peer, why: str) -> None:
        """Drops a peer and its registration; for a scheduler, also the sessions of its engine.

        If two engines have one name, the sessions of the first that leaves may be of the other.
        """
        self._agent.peers.remove(peer)
        if all(each.engine_id != peer.engine_id for each in self._agent.peers):
            self._leaving.discard(peer.engine_id)
        self._watches.forget(peer)
        self._registering.unregister(peer, why)
        if peer.hello.worker_id is None and not self._agent.peers.has_namesake(peer):
            for session in self._agent.sessions:
                if session.key[0] == peer.engine_id:
                    self._agent.sessions.end(session)

    def is_leaving(self, peer: Peer) -> bool:
        """Whether its engine has unregistered: at its end vLLM may leave no time for a GOODBYE."""
        return peer.engine_id in self._leaving

    def _pong(self, reply: Reply, *, known: bool) -> None:
        reply(m.Pong(0, os.getpid(), __version__, self._agent.peers.mapping > 0, known))

    def _register(self, peer: Peer, question: m.RegisterKVCache, reply: Reply) -> None:
        self._leaving.discard(peer.engine_id)
        self._registering.register(peer, question, reply)

    def _unregister(self, peer: Peer, question: m.UnregisterKVCache, reply: Reply) -> None:
        self._leaving.add(peer.engine_id)
        self._registering.unregister_when_mapped(peer, question, reply)

    def end_expired(self, now_s: float) -> None:
        """Ends the sessions of requests that their engines have not ended in time."""
        for session in self._agent.sessions.expired(now_s):
            if not session.ended and session.has_pins:
                logger.warning("request %s was never ended; unpinned", session.key[1])
                self._agent.cache.metrics.count("sessions_timed_out")
            for peer in self._agent.peers:
                if peer.engine_id == session.key[0]:
                    peer.computing.ended(session.key[1])
            self._agent.sessions.end(session)

    def _lookup(self, peer: Peer, question: m.Lookup, reply: Reply) -> None:
        _check_names(question, (*question.before, *question.hashes))
        remote = self._names(peer, question.remote)
        peer.elsewhere = frozenset(each.worker_id for each in question.remote)
        # It may ask again: what it was answered before is not computed beside what it is now.
        begun = (*question.begun, question.request_id)
        peer.computing.told(question.token_s, question.busy_s, begun, self._agent.loop.now())
        if self.is_stopping or not question.hashes:
            reply(m.LookupResult(0, 0))
            return
        if self._recorder is not None:
            reply = self._recorder.looked_up(peer, question, reply)
        LookupJob(self._agent, peer, question, remote, reply).start()

    def _watch(self, peer: Peer, question: m.Watch, reply: Reply) -> None:
        self._watches.watch(peer, question.parts, self._names(peer, question.parts), reply)

    def _copy(
        self, job: type[CopyJob], peer: Peer, question: m.Retrieve | m.Store, reply: Reply
    ) -> None:
        registration, hashes = peer.registration, question.hashes
        if registration is None:
            raise DeviceError("no KV cache is registered on this connection")
        _check_names(question)
        check_blocks(registration, question)
        sessions = self._agent.sessions
        if isinstance(question, m.Retrieve):
            layouts = [form.fingerprint for form in registration.forms]
            if hashes and not self._agent.trust.allows(layouts, hashes[0]):
                reply(m.RetrieveResult(0, tuple(range(len(hashes)))))
                parts = sessions.history.request((peer.engine_id, question.request_id)).parts
                parts.failed += len(hashes)
                parts.add_reasons(("a canary has found other KV in this layout",))
                return
        elif self._agent.peers.hold_stores(peer):
            raise DeviceError("a load of this engine has failed, and its blocks were not taken yet")
        elif self.is_stopping:
            self._agent.cache.metrics.count("drop_shutdown", len(hashes))
            reply(m.StoreResult(0, 0, 0, len(hashes)))
            return
        elif self._recorder is not None:
            self._recorder.stored(question, registration.forms[question.group])
        keys = [(engine, question.request_id) for engine in self._agent.peers.engines_of(peer)]
        key = next((each for each in keys if sessions.get(each) is not None), keys[-1])
        session = sessions.open(key, self._agent.loop.now(), for_lookup=False)
        sessions.history.request(key).tenant = self._agent.peers.tenants.shown(question.tenant)
        job(self._agent, session, registration, question, reply).start()

    def _hold_stores(self, peer: Peer, question: m.HoldStores, reply: Reply) -> None:
        peer.holds_stores = question.held
        reply(m.Done(0))

    def _release(self, peer: Peer, question: m.ReleaseLocks, reply: Reply) -> None:
        session = self._agent.sessions.get((peer.engine_id, question.request_id))
        released = 0 if session is None else sum(map(session.release, question.hashes))
        reply(m.Done(0, released))

    def _end_session(self, peer: Peer, question: m.EndSession, reply: Reply) -> None:
        peer.computing.ended(question.request_id)
        session = self._agent.sessions.get((peer.engine_id, question.request_id))
        if session is not None:
            self._agent.cache.metrics.count("sessions_ended")
            self._agent.sessions.end(session)
        reply(m.Done(0))

    def _clear(self, peer: Peer, question: m.Clear, reply: Reply) -> None:
        """Removes chunks, for good if they are of an epoch that only this engine had."""
        prefixes: set[bytes] = set()
        epoch = question.epoch
        registrations = self._agent.peers.registrations(peer)
        forms = chain.from_iterable(each.forms for each in registrations)
        for each in [*forms, *self._names(peer, question.remote)]:
            if epoch is None:
                prefixes.add(each.names.common)
            else:
                sizes = m.HASH_BYTES_OF_AN_EPOCH
                prefixes |= {each.keys_after(epoch, len(epoch) + nbytes) for nbytes in sizes}
        self._agent.cache.metrics.count("clears")
        reply(m.Done(0, self._agent.cache.clear(sorted(prefixes), for_good=bool(epoch))))

    def _names(self, peer: Peer, remote: Sequence[m.RemoteParts]) -> list[PartNames]:
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


def _check_names(
    question: m.Lookup | m.Store | m.Retrieve, hashes: Sequence[bytes] | None = None
) -> None:
    """hashes: all that it names; None: its own."""
    if len(set(map(len, question.hashes if hashes is None else hashes))) > 1:
        raise WireError("the chunk hashes of a message differ in length")
    if not is_sent(question.tenant):
        raise WireError("no engine sends this name of a tenant")


def check_blocks(registration: Registration, question: m.Store | m.Retrieve) -> None:
    block_ids, chunks = question.block_ids, len(question.hashes)
    layouts = registration.device.layouts
    if question.group >= len(layouts):
        raise WireError(f"a message names group {question.group}, its worker has {len(layouts)}")
    layout = layouts[question.group]
    expected = chunks * layout.blocks_per_part(registration.chunk_tokens)
    if len(block_ids) != expected:
        raise WireError(f"{chunks} chunks need {expected} block ids, not {len(block_ids)}")
    if layout.device != "cpu" and question.after is None:
        raise WireError("a copy on a GPU needs a ticket: its blocks may still be written")
    num_blocks = layout.num_blocks
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise WireError(f"a block id is outside the {num_blocks} blocks of the KV cache")
