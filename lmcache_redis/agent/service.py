# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: one thread that makes every decision and never blocks.

It polls the ROUTER and a wake-up that other threads set when a copy or a tier's job has ended, runs
timers and sends answers. `Handlers` has one entry for each kind of question. A question of a tool
needs no HELLO, all others are of a peer.

    serving ──stop──▶ draining ──nothing in flight, or the deadline, or a second stop──▶ ended

A lost GPU stops it too, and memory that the driver does not close, once nothing is in flight.

While it drains, lookups are misses, stores are dropped and no HELLO is answered. Lookups, retrieves
and stores in flight end, hits that engines were just told of are loaded into their blocks, and
queued chunks are written.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from lmcache_redis import __version__, transport
from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, status_report, summary
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
from lmcache_redis.errors import DeviceError, FormatError, GpuLost, LMCacheRedisError, WireError
from lmcache_redis.processes import process_start_time
from lmcache_redis.tenants import is_sent

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
# After which a silent engine is unregistered.
HEARTBEAT_TIMEOUT_S = 10.0
_MESSAGES_PER_ROUND = 64
_SUMMARY_S = 60.0
# While it drains: how long an engine has to ask for the chunks of a hit, and the longest wait.
_HIT_GRACE_S = 1.0
_DRAIN_POLL_S = 0.01
# An agent that holds memory which it cannot close ends after that, also if it is not idle.
_STUCK_S = 60.0


class Service:
    """Serves one bound ROUTER until ``stop``. `shutdown_deadline_s` may change at any time."""

    def __init__(
        self, agent: Agent, router: zmq.Socket[bytes], recorder: TraceRecorder | None = None
    ) -> None:
        self.shutdown_deadline_s = agent.config.shutdown_deadline_s
        self._agent = agent
        self._router = router
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(agent.wakeup.fd, zmq.POLLIN)
        self._admission = transport.Admission(router, agent.config.endpoint)
        self._poller.register(self._admission.accepted, zmq.POLLIN)
        self._handlers = Handlers(agent, recorder)
        self._welcome = m.Welcome(
            0,
            agent_id=uuid.uuid4().hex,
            agent_pid=os.getpid(),
            agent_start_time=process_start_time(os.getpid()) or 0,
            chunk_size_tokens=agent.config.chunk_size_tokens,
            lookup_deadline_s=agent.config.lookup_deadline_s,
            package_version=__version__,
            canary_every=agent.config.canary_every,
            store_after=agent.config.store_after,
        )
        self._stopping = False
        self._stop_now = False
        self._summarised = agent.cache.metrics.snapshot()
        self._kept_s = agent.loop.now()
        agent.loop.every(_HOUSEKEEPING_S, self._housekeeping)
        agent.loop.every(_SUMMARY_S, self._log_summary)

    def stop(self) -> None:
        """Ends `serve`, and if called again `drain`. From any thread or a signal handler."""
        self._stop_now = self._stopping
        self._stopping = True
        self._agent.wakeup.set()

    def serve(self) -> None:
        while not self._stopping and self._agent.copies.lost is None:
            self._turn(math.inf)

    def ask(self, question: m.Question, reply: Reply) -> None:
        """Answers a question of a tool that has not come through the socket. On the loop.

        Raises ``LMCacheRedisError``.
        """
        self._handlers.answer(None, question, reply)

    def drain(self, deadline_s: float) -> float:
        """Ends what is in flight, until ``deadline_s`` (of the loop's clock); forgets all peers.

        Returns the deadline of what else the agent waits for: now, after a second `stop`.
        """
        self._handlers.is_stopping = True
        if self._agent.cache.warming is not None:
            self._agent.cache.warming.stop()
        hits_until_s = (now_s := self._agent.loop.now()) + _HIT_GRACE_S
        while now_s < deadline_s and not self._stop_now:
            self._agent.cache.begin_writes()  # including chunks gathered meanwhile
            if any(session.cancel_lookup for session in self._agent.sessions):
                hits_until_s = now_s + _HIT_GRACE_S
            if not self._is_busy(now_s < hits_until_s):
                break
            self._turn(_DRAIN_POLL_S)
            now_s = self._agent.loop.now()
        for peer in self._agent.peers:
            self._handlers.forget(peer, "the agent stops")
        for session in self._agent.sessions:
            self._agent.sessions.end(session)
        self._admission.close()
        if self._agent.cache.backlog:
            logger.warning(
                "%d chunks were not written before the agent stopped", self._agent.cache.backlog
            )
        self._log_summary()
        return self._agent.loop.now() if self._stop_now else deadline_s

    def _turn(self, most_s: float) -> None:
        timeout_s = min(self._agent.loop.run_due(), most_s)
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._agent.wakeup.fd in ready:
            self._agent.wakeup.clear()  # before run_posted: later posts wake the next poll
        self._agent.loop.run_posted()
        if self._admission.accepted in ready:
            self._admission.check()
        if self._router in ready:
            self._receive()

    def _is_busy(self, with_hits: bool) -> bool:
        """Whether anything is in flight that an engine waits for or that Redis lacks."""
        return self._agent.cache.backlog > 0 or any(
            session.busy or session.cancel_lookup or (with_hits and session.has_pins)
            for session in self._agent.sessions
        )

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for each in transport.split(frames):
                self._answer(identity, each)

    def _answer(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            question = transport.decode_question(frames)
        except transport.VersionMismatch as error:
            self._refuse(identity, 0, m.VERSION_MISMATCH, str(error))
            return
        except WireError as error:
            self._refuse(identity, transport.call_id_of(frames), m.BAD_MESSAGE, str(error))
            return
        reply = partial(self._reply, identity, question.call_id)
        try:
            if isinstance(question, m.Hello):
                self._greet(identity, question, reply)
                return
            peer = self._agent.peers.get(identity)
            if peer is not None:
                peer.silent_s = 0.0
                peer.welcomed = True
            self._handlers.answer(peer, question, reply)
        except WireError as error:
            self._refuse(identity, question.call_id, m.BAD_MESSAGE, str(error))
        except LMCacheRedisError as error:
            reply(m.Failure(0, m.FAILED, str(error)))
        except Exception:
            # Our own bug: only this question fails.
            logger.exception("a %s failed", type(question).__name__)
            reply(m.Failure(0, m.FAILED, "the agent failed on this question; see its log"))

    def _greet(self, identity: bytes, hello: m.Hello, reply: Reply) -> None:
        if self._handlers.is_stopping:
            return  # it is repeated, and the next agent answers it
        # A client repeats its HELLO until it receives WELCOME.
        peer = self._agent.peers.get(identity)
        if peer is None and len(self._agent.peers) >= m.MAX_PEERS:
            reply(m.Failure(0, m.REFUSED, f"the agent has {m.MAX_PEERS} peers: start another one"))
            return
        if peer is None and not self._admission.is_open:
            reply(m.Failure(0, m.REFUSED, "too few file descriptors are free: see the agent's log"))
            return
        if peer is None or not peer.is_same(hello):
            for old in self._agent.peers.add(Peer(identity, hello, self._agent.loop.now())):
                self._handlers.forget(old, "it has reconnected")
        reply(self._welcome)

    def _refuse(self, identity: bytes, call_id: int, code: str, reason: str) -> None:
        self._agent.cache.metrics.count("wire_errors")
        logger.debug("refused a message: %s", reason)
        self._reply(identity, call_id, m.Failure(0, code, reason))

    def _reply(self, identity: bytes, call_id: int, answer: m.Answer) -> None:
        frames = transport.encode(replace(answer, call_id=call_id))
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer could not be delivered: %s", error)

    def _log_summary(self) -> None:
        before, self._summarised = self._summarised, self._agent.cache.metrics.snapshot()
        line = summary(before, self._summarised)
        if line is not None:
            logger.log(*line)

    def _housekeeping(self) -> None:
        self._admission.check()
        now = self._agent.loop.now()
        # An agent that was stopped, or had no core, has not listened.
        listened_s = min(now - self._kept_s, 2 * _HOUSEKEEPING_S)
        self._kept_s = now
        for peer in self._agent.peers:
            peer.silent_s += listened_s
            if peer.process_gone():
                why = "its process has ended"
            elif peer.silent_s > HEARTBEAT_TIMEOUT_S:
                why = f"it has been silent for {peer.silent_s:.0f} s"
            else:
                continue
            if not self._handlers.is_leaving(peer):
                self._agent.cache.metrics.count("heartbeat_losses")
            self._handlers.forget(peer, why)
        self._handlers.end_expired(now)
        closing = self._agent.copies.closing
        stuck = closing.overdue(now)
        if self._is_busy(with_hits=True):
            # What makes it busy may wait for the same driver.
            stuck = closing.overdue(now - _STUCK_S)
        if stuck and not self._handlers.is_stopping:
            self._agent.copies.lose(GpuLost(0, f"the driver does not close the memory of {stuck}"))


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
