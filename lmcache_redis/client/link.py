"""The connection to the agent, owned by one thread.

The thread owns the socket. It sends HELLO until an agent answers, sends heartbeats, and matches
answers to calls. Other threads submit messages and get a ``Call``; they wait only on request.

    OFFLINE (HELLO every 0.2 s) ──WELCOME──▶ ONLINE ──silence, disconnect──▶ OFFLINE
         └──VERSION_MISMATCH, FAILURE──▶ REFUSED (HELLO every 5 s) ──WELCOME──▶ ONLINE

When the agent is lost, every pending call ends at once, as ``CallState.LOST``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import zmq
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from lmcache_redis import __version__, transport
from lmcache_redis import messages as m
from lmcache_redis.errors import WireError

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_HEARTBEAT_S = 0.5
_REFUSED_TICK_S = 5.0
_GOODBYE_S = 0.5


class CallState(Enum):
    """PENDING until the answer arrives or the agent is lost; LOST calls are never answered."""

    PENDING = "pending"
    ANSWERED = "answered"
    LOST = "lost"


class Call:
    """One message to the agent, from its submission to its answer.

    changed: the condition that is notified when the call ends.
    listener: called with the call when it ends, on the thread that ends it.
    """

    __slots__ = ("_changed", "_listener", "answer", "call_id", "sent", "state")

    def __init__(
        self, call_id: int, changed: threading.Condition, listener: Callable[[Call], None] | None
    ) -> None:
        self.call_id = call_id
        self.state = CallState.PENDING
        self.answer: m.Answer | None = None
        self.sent = False  # whether the agent may have received the message
        self._changed = changed
        self._listener = listener

    @property
    def done(self) -> bool:
        return self.state is not CallState.PENDING

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most ``timeout_s``; returns ``done``."""
        if not self.done and timeout_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: self.done, timeout_s)
        return self.done

    def end(self, answer: m.Answer | None) -> None:
        """Ends the call: ANSWERED with an answer, LOST with None. Only the link does this."""
        with self._changed:
            self.answer = answer
            self.state = CallState.LOST if answer is None else CallState.ANSWERED
        try:
            if self._listener is not None:
                self._listener(self)
        finally:
            # Last, for those who wait for what the listener changes.
            with self._changed:
                self._changed.notify_all()


class LinkState(Enum):
    """State of a link; the module's docstring has the transitions."""

    OFFLINE = "offline"
    ONLINE = "online"
    REFUSED = "refused"
    CLOSED = "closed"


class Duty(Enum):
    """The next task of a link's thread."""

    NOTHING = "nothing"
    HELLO = "hello"
    PING = "ping"
    RECONNECT = "reconnect"  # the agent is silent


def next_duty(
    state: LinkState, *, now_s: float, heard_s: float, sent_s: float, dead_after_s: float
) -> Duty:
    """What is due at ``now_s``, given the times of the last message received and sent."""
    if state is LinkState.ONLINE:
        if now_s - heard_s > dead_after_s:
            return Duty.RECONNECT
        return Duty.PING if now_s - sent_s >= _HEARTBEAT_S else Duty.NOTHING
    pause_s = _REFUSED_TICK_S if state is LinkState.REFUSED else _TICK_S
    return Duty.HELLO if now_s - sent_s >= pause_s else Duty.NOTHING


class AgentLink:
    """The connection of one scheduler, worker or tool to the agent at ``endpoint``.

    ``on_welcome`` is called on the link's thread after each WELCOME. It may ``submit`` (a worker
    registers its memory there) and must not block.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        engine_id: str,
        model_name: str,
        world_size: int,
        worker_id: int | None,
        unnamed: bool = False,
        dead_after_s: float = 1.5,
        on_welcome: Callable[[m.Welcome], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state = LinkState.OFFLINE
        self.welcome: m.Welcome | None = None
        self.refusal: str | None = None  # why the agent cannot be used, if it is REFUSED
        self._hello = m.Hello(
            0, engine_id, model_name, world_size, worker_id, __version__, unnamed=unnamed
        )
        self._dead_after_s = dead_after_s
        self._on_welcome = on_welcome
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._outbox: deque[tuple[Sequence[Call], list[bytes]]] = deque()
        self._pending: dict[int, Call] = {}
        self._hello_id = 0
        self._heard_s = 0.0
        self._sent_s = 0.0
        self._logged: str | None = None
        self._stop = self._is_renamed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = transport.Wakeup()
        self._open_socket()
        self._thread = threading.Thread(target=self._run, name="lmcache-redis-link", daemon=True)
        self._thread.start()

    @property
    def online(self) -> bool:
        """Whether an agent has accepted this link and is alive."""
        return self.state is LinkState.ONLINE

    def submit(
        self, kind: type[m.Message], listener: Callable[[Call], None] | None = None, **fields: Any
    ) -> Call:
        """Sends ``kind(**fields)``. The call is LOST at once if no agent is online.

        ``listener`` is called on the link's thread when the call ends.
        """
        return self.submit_all([kind(call_id=0, **fields)], listener)[0]

    def submit_all(
        self, questions: Sequence[m.Message], listener: Callable[[Call], None] | None = None
    ) -> list[Call]:
        """As `submit`, for questions that go in one message, or a few if they are very many.

        Their ``call_id`` is replaced.
        """
        calls = [Call(next(self._ids), self._changed, listener) for _ in questions]
        if self.online:
            pairs = zip(questions, calls, strict=True)
            addressed = [replace(each, call_id=call.call_id) for each, call in pairs]
            for first in range(0, len(calls), m.MAX_BATCH):
                batch = slice(first, first + m.MAX_BATCH)
                self._outbox.append((calls[batch], transport.encode(*addressed[batch])))
            self._wakeup.set()
            if not self._stop or self._thread.is_alive():
                return calls
        for call in calls:
            if not call.done:
                call.end(None)  # no agent, or the thread ended before it saw the call
        return calls

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for ``condition``, which is evaluated when a call or the link changes state."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def rename(self, engine_id: str) -> None:
        """Connects again, as another engine."""
        self._hello = replace(self._hello, engine_id=engine_id)
        self._is_renamed = True
        self._wakeup.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread and closes the connection; pending calls are LOST."""
        self._stop = True
        self._wakeup.set()
        self._thread.join(timeout_s)

    # The methods below run on the link's thread.

    def _open_socket(self) -> None:
        self._socket, self._monitor = transport.connect_watched_dealer(self._context, self.endpoint)

    def _close_socket(self, linger_s: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _run(self) -> None:
        try:
            while not self._stop:
                self._serve_socket()
        except Exception:
            logger.exception(
                "the link to the agent at %s failed; the cache is off for this engine",
                self.endpoint,
            )
        finally:
            was_online = self.online
            self._set_state(LinkState.CLOSED)
            self._lose_calls()
            said_goodbye = was_online and self._send(m.Goodbye(0))
            self._close_socket(_GOODBYE_S if said_goodbye else 0.0)
            self._context.term()
            self._wakeup.close()

    def _serve_socket(self) -> None:
        """Serves the socket until the link closes or the agent is silent."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wakeup.fd):
            poller.register(source, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(int(_TICK_S * 1000)))
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            if self._socket in ready:
                self._receive()
            if self._monitor in ready:
                self._connection_changed()
            self._send_outbox()
            duty = next_duty(
                self.state,
                now_s=time.monotonic(),
                heard_s=self._heard_s,
                sent_s=self._sent_s,
                dead_after_s=self._dead_after_s,
            )
            if duty is Duty.HELLO:
                self._greet()
            elif duty is Duty.PING:
                self._send(m.Ping(0))
            elif duty is Duty.RECONNECT:
                self._reconnect(f"it has been silent for {self._dead_after_s:g} s")
                return
            if self._is_renamed:
                self._is_renamed = False
                self._send(m.Goodbye(0))
                self._reconnect("this engine has another name now", _GOODBYE_S)
                return

    def _reconnect(self, why: str, linger_s: float = 0.0) -> None:
        self._go_offline(why)
        # Queued messages must not reach a silent agent when it resumes.
        self._close_socket(linger_s)
        self._open_socket()

    def _connection_changed(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._go_offline("it closed the connection")

    def _greet(self) -> None:
        reason = transport.why_untrusted(self.endpoint)
        if reason is not None:
            self._sent_s = time.monotonic()
            self._refused(reason)
            return
        self._hello_id = next(self._ids)
        self._send(replace(self._hello, call_id=self._hello_id))

    def _send(self, message: m.Message) -> bool:
        return self._send_frames(transport.encode(message))

    def _send_frames(self, frames: list[bytes]) -> bool:
        self._sent_s = time.monotonic()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_outbox(self) -> None:
        while self._outbox:
            calls, frames = self._outbox.popleft()
            if self.online and self._send_frames(frames):
                for call in calls:
                    call.sent = True
                    self._pending[call.call_id] = call
                continue
            for call in calls:
                call.end(None)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = transport.decode_answer(frames)
            except transport.VersionMismatch as error:
                self._refused(str(error))
            except WireError as error:
                self._log_once(f"ignored an answer from the agent at {self.endpoint}: {error}")
            else:
                self._heard_s = time.monotonic()
                self._answered(answer)

    def _answered(self, answer: m.Answer) -> None:
        if isinstance(answer, m.Welcome) and answer.call_id == self._hello_id:
            self._welcomed(answer)
            return
        call = self._pending.pop(answer.call_id, None)
        if call is not None:
            call.end(answer)
        if isinstance(answer, m.Failure):
            if answer.code == m.UNKNOWN_PEER and self.online:
                self._go_offline("it was restarted")
                self._greet()
            elif answer.call_id == self._hello_id:
                self._refused(answer.reason)

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        if self.online:
            return
        self._logged = self.refusal = None
        logger.info(
            "connected to the agent at %s (process %d, chunks of %d tokens)",
            self.endpoint, welcome.agent_pid, welcome.chunk_size_tokens,
        )  # fmt: skip
        self._set_state(LinkState.ONLINE)
        self._send(m.Ping(0))  # acknowledges the WELCOME
        if self._on_welcome is not None:
            self._on_welcome(welcome)

    def _refused(self, reason: str) -> None:
        self.refusal = f"the agent at {self.endpoint} cannot be used: {reason}"
        self._log_once(self.refusal)
        self._set_state(LinkState.REFUSED)
        self._lose_calls()

    def _go_offline(self, why: str) -> None:
        if self.online:
            logger.warning(
                "lost the agent at %s: %s; computing without the cache until it is back",
                self.endpoint, why,
            )  # fmt: skip
        if self.state is not LinkState.REFUSED:
            self._set_state(LinkState.OFFLINE)
        self._lose_calls()

    def _lose_calls(self) -> None:
        lost = list(self._pending.values())
        self._pending.clear()
        while self._outbox:
            lost += self._outbox.popleft()[0]
        for call in lost:
            call.end(None)

    def _log_once(self, sentence: str) -> None:
        """Logs a sentence, unless it was the last one logged since the last WELCOME."""
        if sentence != self._logged:
            self._logged = sentence
            logger.error("%s", sentence)

    def _set_state(self, state: LinkState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
