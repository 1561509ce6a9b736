"""The agent's loop: one thread that makes every decision and never blocks.

It polls the ROUTER and a wake-up that other threads set when a copy or a tier's job has ended, runs
timers and sends answers. ``handlers`` decides what to do with each question.

    serving ──stop──▶ draining ──nothing in flight, or the deadline, or a second stop──▶ ended

A lost GPU stops it too.

While it drains, lookups are misses, stores are dropped and no HELLO is answered. Lookups, retrieves
and stores in flight end, hits that engines were just told of are loaded into their blocks, and
queued chunks are written.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import time
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
from lmcache_redis.agent.recording import TraceRecorder
from lmcache_redis.config import endpoint_path
from lmcache_redis.errors import LMCacheRedisError, WireError
from lmcache_redis.processes import free_descriptors, process_start_time
from lmcache_redis.transport import hidden_path

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
_MESSAGES_PER_ROUND = 64
_SUMMARY_S = 60.0
# While it drains: how long an engine has to ask for the chunks of a hit, and the longest wait.
_HIT_GRACE_S = 1.0
_DRAIN_POLL_S = 0.01
# An eighth of the limit is for what the agent opens meanwhile (files of the disk tier, connections
# to Redis), and for connections that are accepted before it notices.
_LEAST_RESERVE, _MOST_RESERVE = 64, 1024


class Service:
    """Serves one bound ROUTER until ``stop``. The two settings may change at any time."""

    def __init__(
        self, agent: Agent, router: zmq.Socket[bytes], recorder: TraceRecorder | None = None
    ) -> None:
        self.heartbeat_timeout_s = agent.config.heartbeat_timeout_s
        self.shutdown_deadline_s = agent.config.shutdown_deadline_s
        self._agent = agent
        self._router = router
        self._admission = Admission(router, agent.config.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(agent.wakeup.fd, zmq.POLLIN)
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
        )
        self._stopping = False
        self._stop_now = False
        self._summarised = agent.cache.metrics.snapshot()
        agent.loop.after(_HOUSEKEEPING_S, self._housekeeping)
        agent.loop.after(_SUMMARY_S, self._summarise)

    def stop(self) -> None:
        """Ends `serve`, and if called again `drain`. From any thread or a signal handler."""
        self._stop_now = self._stopping
        self._stopping = True
        self._agent.wakeup.set()

    def serve(self) -> None:
        """Serves until `stop`, or until a GPU is lost."""
        while not self._stopping and self._agent.copies.lost is None:
            self._turn(math.inf)

    def drain(self, deadline_s: float) -> float:
        """Ends what is in flight, until ``deadline_s`` (`time.monotonic()`); forgets all peers.

        Returns the deadline of what else the agent waits for: now, after a second `stop`.
        """
        self._handlers.is_stopping = True
        hits_until_s = (now_s := time.monotonic()) + _HIT_GRACE_S
        while now_s < deadline_s and not self._stop_now:
            self._agent.cache.begin_writes()  # including chunks gathered meanwhile
            if any(session.cancel_lookup for session in self._agent.sessions):
                hits_until_s = now_s + _HIT_GRACE_S
            if not self._is_busy(now_s < hits_until_s):
                break
            self._turn(_DRAIN_POLL_S)
            now_s = time.monotonic()
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
        return time.monotonic() if self._stop_now else deadline_s

    def _turn(self, most_s: float) -> None:
        """Waits for what comes next, for at most ``most_s``, and handles it."""
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
        if isinstance(question, m.Hello):
            if self._handlers.is_stopping:
                return  # it is repeated, and the next agent answers it
            self._greet(identity, question, reply)
            return
        peer = self._agent.peers.get(identity)
        if peer is not None:
            peer.last_heard_s = time.monotonic()
            peer.welcomed = True
        try:
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
        # A client repeats its HELLO until it receives WELCOME.
        peer = self._agent.peers.get(identity)
        if peer is None and len(self._agent.peers) >= m.MAX_PEERS:
            reply(m.Failure(0, m.REFUSED, f"the agent has {m.MAX_PEERS} peers: start another one"))
            return
        if peer is None and not self._admission.is_open:
            reply(m.Failure(0, m.REFUSED, "too few file descriptors are free: see the agent's log"))
            return
        if peer is None or not peer.is_same(hello):
            now_s = time.monotonic()
            for old in self._agent.peers.add(Peer(identity, hello, now_s, now_s)):
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

    def _summarise(self) -> None:
        self._agent.loop.after(_SUMMARY_S, self._summarise)
        self._log_summary()

    def _log_summary(self) -> None:
        before, self._summarised = self._summarised, self._agent.cache.metrics.snapshot()
        line = summary(before, self._summarised)
        if line is not None:
            logger.log(*line)

    def _housekeeping(self) -> None:
        self._agent.loop.after(_HOUSEKEEPING_S, self._housekeeping)
        self._admission.check()
        now = time.monotonic()
        for peer in self._agent.peers:
            if peer.process_gone():
                self._handlers.forget(peer, "its process has ended")
                self._agent.cache.metrics.count("heartbeat_losses")
            elif now - peer.last_heard_s > self.heartbeat_timeout_s:
                silent_s = now - peer.last_heard_s
                self._handlers.forget(peer, f"it has been silent for {silent_s:.0f} s")
                self._agent.cache.metrics.count("heartbeat_losses")
        for session in self._agent.sessions.expired(now):
            if not session.ended and session.has_pins:
                logger.warning("request %s was never ended; unpinned", session.key[1])
                self._agent.cache.metrics.count("sessions_timed_out")
            self._agent.sessions.end(session)


class Admission:
    """Lets no new peers in while file descriptors are short. Owned by the loop thread.

    Each engine takes a descriptor for its connection and one for each piece of its memory. libzmq
    ends the process if it cannot accept a connection for want of one, and cannot be told to stop
    accepting without losing the connections that it has. So the socket's file is renamed: new peers
    do not find it, and connected ones are served on. It has its name again when descriptors are
    free.

    accepted: readable after a connection, so that a crowd is noticed while it comes.
    """

    def __init__(self, router: zmq.Socket[bytes], endpoint: str) -> None:
        self.accepted = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self.is_open = True
        self._router = router
        self._path = endpoint_path(endpoint)
        self._hidden = hidden_path(self._path)
        self._is_stuck = False

    def check(self) -> None:
        """Shuts the way if descriptors are short, and opens it again."""
        while self.accepted.poll(0):
            self.accepted.recv_multipart()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = min(max(_LEAST_RESERVE, limit // 8), _MOST_RESERVE, limit // 4)
        free = free_descriptors()
        if self.is_open and free < reserve:
            self._shut(free, limit)
        elif not self.is_open and free >= reserve + reserve // 4:
            self._reopen()

    def close(self) -> None:
        """Gives the socket's file its name back."""
        if not self.is_open:
            self._reopen()
        self._router.disable_monitor()
        self.accepted.close(linger=0)

    def _shut(self, free: int, limit: int) -> None:
        try:
            os.rename(self._path, self._hidden)
        except OSError as error:
            logger.error("the socket %s cannot be renamed: %s", self._path, error)
            return
        self.is_open = False
        logger.error(
            "too few file descriptors are free (%d of %d): no engine or tool can connect to %s "
            "until there are more; raise the limit (ulimit -n, LimitNOFILE of systemd)",
            free, limit, self._path,
        )  # fmt: skip

    def _reopen(self) -> None:
        try:
            os.link(self._hidden, self._path)  # unlike a rename, replaces no other agent's socket
            os.unlink(self._hidden)
        except OSError as error:
            if not self._is_stuck:
                logger.error("the socket %s cannot be opened again: %s", self._path, error)
            self._is_stuck = True
            return
        self.is_open, self._is_stuck = True, False
        logger.info("file descriptors are free: engines can connect to %s again", self._path)
