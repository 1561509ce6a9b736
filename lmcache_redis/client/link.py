"""One connection to the agent, kept by a thread of its own.

The thread owns the socket. It greets the agent, greets it again when it comes back, keeps
the connection alive with heartbeats, and pairs answers with calls. Callers hand in a
question and get a ``Call``; nothing here makes them wait unless they ask to.

    OFFLINE ──connected──▶ GREETING ──WELCOME──▶ ONLINE ──silence, disconnect──▶ OFFLINE
                               └──VERSION_MISMATCH──▶ REFUSED (greets on, seldom)

Every call that is pending when the agent is lost ends as ``CallState.LOST`` at that moment.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_redis import messages as m
from lmcache_redis.errors import WireError
from lmcache_redis.transport import Wakeup, connect_watched_dealer, distrust
from lmcache_redis.version import __version__

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_HEARTBEAT_S = 0.5
_REFUSED_TICK_S = 5.0
_GOODBYE_S = 0.5


class LinkState(Enum):
    """Where a link stands with its agent."""

    OFFLINE = "offline"
    GREETING = "greeting"
    ONLINE = "online"
    REFUSED = "refused"
    CLOSED = "closed"


class CallState(Enum):
    """How a call stands: ANSWERED has an answer, LOST never will."""

    PENDING = "pending"
    ANSWERED = "answered"
    LOST = "lost"


class Call:
    """A question on its way, and later its answer."""

    __slots__ = ("_changed", "_listener", "answer", "call_id", "sent", "state")

    def __init__(
        self,
        call_id: int,
        changed: threading.Condition,
        listener: Callable[[Call], None] | None,
    ) -> None:
        self.call_id = call_id
        self.state = CallState.PENDING
        self.answer: m.Answer | None = None
        self.sent = False  # whether the agent may have seen the question
        self._changed = changed
        self._listener = listener

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.state is not CallState.PENDING

    def wait(self, timeout_s: float) -> bool:
        """Waits until done or for ``timeout_s``; returns ``done``."""
        if self.state is CallState.PENDING and timeout_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: self.done, timeout_s)
        return self.done

    def settle(self, state: CallState, answer: m.Answer | None) -> None:
        """Ends the call; only the link does this."""
        with self._changed:
            self.answer = answer
            self.state = state
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(self)


_M = TypeVar("_M", bound=m.Message)
Introduction = Callable[[m.Welcome], None]


class AgentLink:
    """The connection of one scheduler, worker or tool to the agent at ``endpoint``.

    ``on_welcome`` is called on the link's thread each time an agent has welcomed this link;
    it may ``submit`` (a worker registers its memory there). It must not block.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        engine_id: str,
        model_name: str,
        world_size: int,
        worker_id: int | None,
        dead_after_s: float = 1.5,
        on_welcome: Introduction | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state = LinkState.OFFLINE
        self.welcome: m.Welcome | None = None
        self._identity: dict[str, Any] = {
            "engine_id": engine_id,
            "model_name": model_name,
            "world_size": world_size,
            "worker_id": worker_id,
            "package_version": __version__,
        }
        self._dead_after_s = dead_after_s
        self._on_welcome = on_welcome
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._outbox: deque[tuple[Call, list[bytes]]] = deque()
        self._pending: dict[int, Call] = {}
        self._hello_id = 0
        self._last_heard_s = 0.0
        self._last_sent_s = 0.0
        self._said: str | None = None
        self._stop = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup()
        self._open_socket()
        self._thread = threading.Thread(target=self._run, name="lmcache-redis-link", daemon=True)
        self._thread.start()

    @property
    def online(self) -> bool:
        """Whether an agent has welcomed this link and is still there."""
        return self.state is LinkState.ONLINE

    def submit(
        self, kind: type[_M], listener: Callable[[Call], None] | None = None, **fields: Any
    ) -> Call:
        """Sends ``kind(**fields)``. The call is LOST at once where no agent is online.

        ``listener`` is called on the link's thread when the call is done.
        """
        call = Call(next(self._ids), self._changed, listener)
        if self.state is not LinkState.ONLINE:
            call.settle(CallState.LOST, None)
            return call
        self._outbox.append((call, m.encode(kind(call_id=call.call_id, **fields))))
        self._wakeup.set()
        if self._stop and not self._thread.is_alive() and not call.done:
            call.settle(CallState.LOST, None)  # it left before it saw this one
        return call

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until ``condition``, looked at whenever a call is done, or for ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wait_online(self, timeout_s: float) -> bool:
        """Waits for an agent's welcome; returns whether one came."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.state in (LinkState.ONLINE, LinkState.REFUSED, LinkState.CLOSED),
                timeout_s,
            )
        return self.online

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread and the connection; pending calls are LOST."""
        self._stop = True
        self._wakeup.set()
        self._thread.join(timeout_s)

    # What follows runs on the link's thread.

    def _open_socket(self) -> None:
        self._socket, self._monitor = connect_watched_dealer(self._context, self.endpoint)

    def _close_socket(self, linger_s: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _run(self) -> None:
        try:
            while not self._stop:
                self._round()
        except Exception:
            logger.exception("the link to the agent at %s broke; no more hits", self.endpoint)
        finally:
            known = self.state is LinkState.ONLINE
            self._set_state(LinkState.CLOSED)
            self._lose_everything()
            said = known and self._send(m.encode(m.Goodbye(0)))
            self._close_socket(_GOODBYE_S if said else 0.0)
            self._context.term()
            self._wakeup.close()

    def _round(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        generation = self._socket
        while not self._stop and self._socket is generation:
            ready = dict(poller.poll(int(_TICK_S * 1000)))
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            if self._socket in ready:
                self._receive()
            if self._monitor in ready:
                self._watch_connection()
            self._send_outbox()
            self._tick()

    def _watch_connection(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._go_offline("it closed the connection")

    def _tick(self) -> None:
        now = time.monotonic()
        if self.state is LinkState.ONLINE:
            if now - self._last_heard_s > self._dead_after_s:
                self._go_offline(f"it has been silent for {self._dead_after_s:g} s")
                # What the silent agent has not read must not reach it when it wakes.
                self._close_socket()
                self._open_socket()
            elif now - self._last_sent_s >= _HEARTBEAT_S:
                self._send(m.encode(m.Ping(call_id=0)))
        else:
            pause_s = _REFUSED_TICK_S if self.state is LinkState.REFUSED else _TICK_S
            if now - self._last_sent_s >= pause_s:
                self._greet()

    def _greet(self) -> None:
        reason = distrust(self.endpoint)
        if reason is not None:
            self._last_sent_s = time.monotonic()
            self._refused(reason)
            return
        self._hello_id = next(self._ids)
        sent = self._send(m.encode(m.Hello(call_id=self._hello_id, **self._identity)))
        if sent and self.state is LinkState.OFFLINE:
            self._set_state(LinkState.GREETING)

    def _send(self, frames: list[bytes]) -> bool:
        self._last_sent_s = time.monotonic()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_outbox(self) -> None:
        while self._outbox:
            call, frames = self._outbox.popleft()
            if self.state is LinkState.ONLINE:
                self._pending[call.call_id] = call
                call.sent = self._send(frames)
                if call.sent:
                    continue
                del self._pending[call.call_id]
            call.settle(CallState.LOST, None)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = m.decode_answer(frames)
            except m.VersionMismatch as error:
                self._refused(str(error))
            except WireError as error:
                self._say(f"ignored an answer of the agent at {self.endpoint}: {error}")
            else:
                self._last_heard_s = time.monotonic()
                self._take(answer)

    def _take(self, answer: m.Answer) -> None:
        if isinstance(answer, m.Welcome) and answer.call_id == self._hello_id:
            self._welcomed(answer)
            return
        call = self._pending.pop(answer.call_id, None)
        if call is not None:
            call.settle(CallState.ANSWERED, answer)
        if isinstance(answer, m.Failure):
            if answer.code == m.UNKNOWN_PEER and self.state is LinkState.ONLINE:
                self._go_offline("it was restarted")
                self._greet()
            elif answer.call_id == self._hello_id:
                self._refused(answer.reason)

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        if self.state is LinkState.ONLINE:
            return
        self._said = None
        logger.info(
            "connected to the agent at %s (process %d, chunks of %d tokens)",
            self.endpoint, welcome.agent_pid, welcome.chunk_size_tokens,
        )  # fmt: skip
        self._set_state(LinkState.ONLINE)
        self._send(m.encode(m.Ping(call_id=0)))  # tells the agent that its welcome has arrived
        if self._on_welcome is not None:
            self._on_welcome(welcome)

    def _refused(self, reason: str) -> None:
        self._say(f"the agent at {self.endpoint} cannot be used: {reason}")
        self._set_state(LinkState.REFUSED)
        self._lose_everything()

    def _go_offline(self, why: str) -> None:
        if self.state is LinkState.ONLINE:
            logger.warning(
                "lost the agent at %s: %s; computing without the cache until it is back",
                self.endpoint, why,
            )  # fmt: skip
        if self.state is not LinkState.REFUSED:
            self._set_state(LinkState.OFFLINE)
        self._lose_everything()

    def _lose_everything(self) -> None:
        lost = list(self._pending.values())
        self._pending.clear()
        while self._outbox:
            lost.append(self._outbox.popleft()[0])
        for call in lost:
            call.settle(CallState.LOST, None)

    def _say(self, sentence: str) -> None:
        """Logs a sentence once, until the next welcome."""
        if sentence != self._said:
            self._said = sentence
            logger.error("%s", sentence)

    def _set_state(self, state: LinkState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
