"""The agent's loop: one thread that makes every decision and never blocks.

It polls the ROUTER and a wake-up that other threads set when a copy or a tier's job has ended, runs
timers and sends answers. ``handlers`` decides what to do with each question.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Sequence
from functools import partial

import zmq
from msgspec.structs import replace

from lmcache_redis import __version__, codec
from lmcache_redis import messages as m
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.parts import Agent
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.status import summary
from lmcache_redis.agent.transfers import Reply
from lmcache_redis.errors import LMCacheRedisError, WireError
from lmcache_redis.processes import process_start_time

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
_MESSAGES_PER_ROUND = 64
_SUMMARY_S = 60.0


class Service:
    """Serves one bound ROUTER until ``stop``."""

    def __init__(self, agent: Agent, router: zmq.Socket[bytes]) -> None:
        self._config = agent.config
        self._wakeup = agent.wakeup
        self._loop = agent.loop
        self._cache = agent.cache
        self._sessions = agent.sessions
        self._metrics = agent.cache.metrics
        self._peers = agent.peers
        self._router = router
        self._handlers = Handlers(agent)
        self._agent_id = uuid.uuid4().hex
        self._start_time = process_start_time(os.getpid()) or 0
        self._stopping = False
        self._summarised = agent.cache.metrics.snapshot()
        self._loop.after(_HOUSEKEEPING_S, self._housekeeping)
        self._loop.after(_SUMMARY_S, self._summarise)

    def stop(self) -> None:
        """Ends ``run``, from any thread or a signal handler."""
        self._stopping = True
        self._wakeup.set()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        while not self._stopping:
            timeout_s = self._loop.run_due()
            ready = dict(poller.poll(math.ceil(timeout_s * 1000)))
            if self._wakeup.fd in ready:
                self._wakeup.clear()  # before run_posted: later posts wake the next poll
            self._loop.run_posted()
            if self._router in ready:
                self._receive()

    def drain(self, deadline_s: float) -> None:
        """Forgets all peers, then waits for writes until ``deadline_s`` (`time.monotonic()`)."""
        for peer in self._peers:
            self._handlers.forget(peer, "the agent stops")
        for session in self._sessions:
            self._sessions.end(session)
        while time.monotonic() < deadline_s and self._cache.backlog:
            self._loop.run_posted()
            self._loop.run_due()
            self._cache.begin_writes()  # including chunks gathered meanwhile
            time.sleep(0.005)
        if self._cache.backlog:
            logger.warning(
                "%d chunks were not written before the agent stopped", self._cache.backlog
            )
        self._log_summary()

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for question in codec.split(frames):
                self._take(identity, question)

    def _take(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            question = codec.decode_question(frames)
        except codec.VersionMismatch as error:
            self._refuse(identity, 0, m.VERSION_MISMATCH, str(error))
            return
        except WireError as error:
            self._refuse(identity, codec.call_id_of(frames), m.BAD_MESSAGE, str(error))
            return
        reply = partial(self._reply, identity, question.call_id)
        if isinstance(question, m.Hello):
            self._welcome(identity, question, reply)
            return
        peer = self._peers.get(identity)
        if peer is not None:
            peer.last_heard_s = time.monotonic()
            peer.welcomed = True
        try:
            if self._handlers.answer_anyone(question, reply):
                return
            if peer is None:
                reply(m.Failure(0, m.UNKNOWN_PEER, "say HELLO first"))
                return
            self._handlers.answer_peer(peer, question, reply)
        except WireError as error:
            self._refuse(identity, question.call_id, m.BAD_MESSAGE, str(error))
        except LMCacheRedisError as error:
            reply(m.Failure(0, m.FAILED, str(error)))
        except Exception:
            # Our own bug: only this question fails.
            logger.exception("a %s failed", type(question).__name__)
            reply(m.Failure(0, m.FAILED, "the agent failed on this question; see its log"))

    def _welcome(self, identity: bytes, hello: m.Hello, reply: Reply) -> None:
        # A client repeats its HELLO until it receives WELCOME.
        peer = self._peers.get(identity)
        if peer is None and len(self._peers) >= m.MAX_PEERS:
            reply(m.Failure(0, m.REFUSED, f"the agent has {m.MAX_PEERS} peers: start another one"))
            return
        if peer is None or not peer.is_same(hello):
            now_s = time.monotonic()
            for old in self._peers.add(Peer(identity, hello, now_s, now_s)):
                self._handlers.forget(old, "it has reconnected")
        config = self._config
        reply(
            m.Welcome(
                0,
                agent_id=self._agent_id,
                agent_pid=os.getpid(),
                agent_start_time=self._start_time,
                chunk_size_tokens=config.chunk_size_tokens,
                lookup_deadline_s=config.lookup_deadline_s,
                package_version=__version__,
            )
        )

    def _refuse(self, identity: bytes, call_id: int, code: str, reason: str) -> None:
        self._metrics.count("wire_errors")
        logger.debug("refused a message: %s", reason)
        self._reply(identity, call_id, m.Failure(0, code, reason))

    def _reply(self, identity: bytes, call_id: int, answer: m.Answer) -> None:
        frames = codec.encode(replace(answer, call_id=call_id))
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer could not be delivered: %s", error)

    def _summarise(self) -> None:
        self._loop.after(_SUMMARY_S, self._summarise)
        self._log_summary()

    def _log_summary(self) -> None:
        before, self._summarised = self._summarised, self._metrics.snapshot()
        line = summary(before, self._summarised)
        if line is not None:
            logger.log(*line)

    def _housekeeping(self) -> None:
        self._loop.after(_HOUSEKEEPING_S, self._housekeeping)
        now = time.monotonic()
        for peer in self._peers:
            if peer.process_gone():
                self._handlers.forget(peer, "its process has ended")
                self._metrics.count("heartbeat_losses")
            elif now - peer.last_heard_s > self._config.heartbeat_timeout_s:
                silent_s = now - peer.last_heard_s
                self._handlers.forget(peer, f"it has been silent for {silent_s:.0f} s")
                self._metrics.count("heartbeat_losses")
        for session in self._sessions.expired(now):
            if not session.ended and session.pinned_chunks:
                logger.warning("request %s was never ended; unpinned", session.key[1])
                self._metrics.count("sessions_timed_out")
            self._sessions.end(session)
