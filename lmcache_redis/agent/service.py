"""The agent's loop: one thread that owns every decision and waits for nobody.

It polls the ROUTER and a wake-up that other threads ring when a copy or a Redis operation
has ended, runs timers, and answers. ``handlers`` says what is done with each question.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from functools import partial

import zmq

from lmcache_redis import messages as m
from lmcache_redis.agent.core import Core, Reply
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.peers import Peer, Peers
from lmcache_redis.agent.summary import summary
from lmcache_redis.agent.writes import Writes
from lmcache_redis.device.handles import process_start_time
from lmcache_redis.errors import LMCacheRedisError, WireError
from lmcache_redis.version import __version__

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
_MESSAGES_A_ROUND = 64
_SUMMARY_S = 60.0


class Service:
    """Serves one bound ROUTER until ``stop``."""

    def __init__(self, core: Core, router: zmq.Socket[bytes]) -> None:
        self.core = core
        self.peers = Peers()
        self.writes = Writes(core)
        self._router = router
        self._handlers = Handlers(core, self.peers, self.writes)
        self._agent_id = uuid.uuid4().hex
        self._start_time = process_start_time(os.getpid())
        self._stopping = False
        self._summarised = core.metrics.snapshot()
        core.timers.after(_HOUSEKEEPING_S, self._housekeeping)
        core.timers.after(_SUMMARY_S, self._summarise)

    def stop(self) -> None:
        """Ends ``run``, from any thread or a signal handler."""
        self._stopping = True
        self.core.wakeup.set()

    def run(self) -> None:
        """Serves until ``stop`` is called."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self.core.wakeup.fd, zmq.POLLIN)
        while not self._stopping:
            timeout_s = self._run_timers()
            ready = dict(poller.poll(math.ceil(timeout_s * 1000)))
            self.core.run_posted()
            if self._router in ready:
                self._receive()

    def drain(self, deadline_s: float) -> None:
        """Lets engines go, then finishes or abandons writes until ``deadline_s`` (monotonic)."""
        for peer in self.peers:
            self._handlers.forget(peer, "the agent stops")
        for session in self.core.sessions:
            self.core.log_line(self.core.sessions.end(session))
        disk = self.core.disk
        while time.monotonic() < deadline_s and (
            len(self.writes) or (disk is not None and disk.backlog)
        ):
            self.core.run_posted()
            self.writes.begin_all()  # also what was gathered meanwhile
            time.sleep(0.005)
        if len(self.writes):
            logger.warning("%d chunks were not written before the agent stopped", len(self.writes))
        self._log_summary()

    def _run_timers(self) -> float:
        try:
            return self.core.timers.run_due()
        except Exception:
            logger.exception("a timer of the agent failed")  # our own bug: that timer alone
            return 0.0

    def _receive(self) -> None:
        for _ in range(_MESSAGES_A_ROUND):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(identity, frames)

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            question = m.decode_question(frames)
        except m.VersionMismatch as error:
            self._refuse(identity, 0, m.VERSION_MISMATCH, str(error))
            return
        except WireError as error:
            self._refuse(identity, m.call_id_of(frames), m.BAD_MESSAGE, str(error))
            return
        reply = partial(self._reply, identity, question.call_id)
        if isinstance(question, m.Hello):
            self._welcome(identity, question, reply)
            return
        peer = self.peers.get(identity)
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
            # Our own bug: that question alone fails.
            logger.exception("a %s failed", type(question).__name__)
            reply(m.Failure(0, m.FAILED, "the agent failed on this question, see its log"))

    def _welcome(self, identity: bytes, hello: m.Hello, reply: Reply) -> None:
        # A client says HELLO until it is welcomed, so the same one may come several times.
        peer = self.peers.get(identity)
        if peer is None and len(self.peers) >= m.MAX_PEERS:
            reply(m.Failure(0, m.REFUSED, f"the agent has {m.MAX_PEERS} peers: start another one"))
            return
        if peer is None or not peer.is_same(hello):
            now_s = time.monotonic()
            for old in self.peers.add(Peer(identity, hello, now_s, now_s)):
                self._handlers.forget(old, "it has connected anew")
        config = self.core.config
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
        self.core.metrics.count("wire_errors")
        logger.debug("refused a message: %s", reason)
        self._reply(identity, call_id, m.Failure(0, code, reason))

    def _reply(self, identity: bytes, call_id: int, answer: m.Answer) -> None:
        frames = m.encode(m.addressed(answer, call_id))
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer found nobody: %s", error)

    def _summarise(self) -> None:
        self.core.timers.after(_SUMMARY_S, self._summarise)
        self._log_summary()

    def _log_summary(self) -> None:
        before, self._summarised = self._summarised, self.core.metrics.snapshot()
        line = summary(before, self._summarised)
        if line is not None:
            logger.log(*line)

    def _housekeeping(self) -> None:
        self.core.timers.after(_HOUSEKEEPING_S, self._housekeeping)
        now = time.monotonic()
        for peer in self.peers:
            if peer.process_gone():
                self._handlers.forget(peer, "its process has ended")
                self.core.metrics.count("heartbeat_losses")
            elif now - peer.last_heard_s > self.core.config.heartbeat_timeout_s:
                silent_s = now - peer.last_heard_s
                self._handlers.forget(peer, f"it has been silent for {silent_s:.0f} s")
                self.core.metrics.count("heartbeat_losses")
        for session in self.core.sessions.expired(now):
            if not session.ended and session.pinned_chunks:
                logger.warning("request %s was never ended; unpinned", session.key[1])
                self.core.metrics.count("sessions_timed_out")
            self.core.log_line(self.core.sessions.end(session))
