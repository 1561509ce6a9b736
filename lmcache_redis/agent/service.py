# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: one thread that makes every decision and never blocks.

It polls the ROUTER and a wake-up that other threads set when a copy or a tier's job has ended, runs
timers and sends answers, which `Handlers` has.

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
from collections.abc import Sequence
from functools import partial

import zmq
from msgspec.structs import replace

from lmcache_redis import __version__, transport
from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, summary
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.peers import Peer, Reply
from lmcache_redis.agent.reports.recording import TraceRecorder
from lmcache_redis.errors import GpuLost, LMCacheRedisError, WireError
from lmcache_redis.processes import process_start_time

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
