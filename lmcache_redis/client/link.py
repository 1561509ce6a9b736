# SPDX-License-Identifier: Apache-2.0
"""The connection to the agent, owned by one thread, and the calls that go over it.

The thread owns the socket. It sends HELLO until an agent answers, sends heartbeats, and matches
answers to calls. Other threads submit messages and get an ``AgentCall``; they wait only on request.

    OFFLINE (HELLO every 0.2 s) ──WELCOME──▶ ONLINE ──silence, disconnect──▶ OFFLINE
         └──FAILURE, no answer of ours──▶ REFUSED (HELLO every 5 s) ──WELCOME──▶ ONLINE

If none has answered after five seconds, a line says so, once. Of the links of one engine on one
node, one ``speaks``; the others say the same for debugging only.

When the agent is lost, every pending call ends at once, without an answer.

An error that is not expected here is a bug of ours, or the process lacks memory or descriptors. It
is logged, once in a row of them, and costs the connection: the link connects again after a pause,
which doubles.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from msgspec.structs import replace

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.client.news import AgentNews, ErrorRow, Patience
from lmcache_redis.errors import WireError
from lmcache_redis.processes import NamedThread

logger = logging.getLogger("vllm.lmcache_redis")

_TICK_S = 0.2
_HEARTBEAT_S = 0.5
_REFUSED_TICK_S = 5.0
_GOODBYE_S = 0.5


@dataclass(slots=True, eq=False)
class AgentCall:
    """One message to the agent, from its submission until it is done: answered or lost.

    changed: notified when the call ends. listener: called with it then, on the thread that ends it.
    sent: whether the agent may have received the message. answer: None also if the call is lost.
    """

    call_id: int
    changed: threading.Condition
    listener: Callable[[AgentCall], None] | None
    done: bool = False
    answer: m.Answer | None = None
    sent: bool = False

    @property
    def lost(self) -> bool:
        return self.done and self.answer is None

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most ``timeout_s``; returns ``done``."""
        if not self.done and timeout_s > 0:
            with self.changed:
                self.changed.wait_for(lambda: self.done, timeout_s)
        return self.done

    def end(self, answer: m.Answer | None) -> None:
        """Ends the call, as lost without an answer. Only the link does this."""
        with self.changed:
            self.answer = answer
            self.done = True  # last: threads read both without the lock
        try:
            if self.listener is not None:
                self.listener(self)
        except Exception:
            logger.exception("what waits for an agent's answer failed")  # our own bug: only that
        # Last, for those who wait for what the listener changes.
        with self.changed:
            self.changed.notify_all()


# Calls, and the message that carries them.
Batch = tuple[Sequence[AgentCall], list[bytes]]


class AgentCalls:
    """The calls of one link: those to be sent, and those that wait for an answer."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ids = itertools.count(1)
        self._outbox: deque[Batch] = deque()
        self._pending: dict[int, AgentCall] = {}

    def new(self, count: int, listener: Callable[[AgentCall], None] | None) -> list[AgentCall]:
        return [AgentCall(next(self.ids), self.changed, listener) for _ in range(count)]

    def put(self, questions: Sequence[m.Message], calls: Sequence[AgentCall]) -> None:
        """Queues the questions with the ids of their calls, in one message or a few."""
        pairs = zip(questions, calls, strict=True)
        addressed = [replace(each, call_id=call.call_id) for each, call in pairs]
        for first in range(0, len(calls), m.MAX_BATCH):
            batch = slice(first, first + m.MAX_BATCH)
            self._outbox.append((calls[batch], transport.encode(*addressed[batch])))

    def take_queued(self) -> Iterator[Batch]:
        while self._outbox:
            yield self._outbox.popleft()

    def sent(self, calls: Sequence[AgentCall]) -> None:
        for call in calls:
            call.sent = True
            self._pending[call.call_id] = call

    def answered(self, answer: m.Answer) -> None:
        """Ends the call that this answers, if there is one."""
        call = self._pending.pop(answer.call_id, None)
        if call is not None:
            call.end(answer)

    def lose_all(self) -> None:
        lost = list(self._pending.values())
        self._pending.clear()
        for calls, _ in self.take_queued():
            lost += calls
        lose(lost)


def lose(calls: Sequence[AgentCall]) -> None:
    """Ends those of the calls that have not ended, as lost."""
    for call in calls:
        if not call.done:
            call.end(None)


class AgentLink:
    """The connection of one scheduler or worker to the agent at ``endpoint``.

    online: an agent has accepted this link and is alive. refusal: why the agent cannot be used.
    on_welcome: called on the link's thread after each WELCOME. It may ``submit`` (a worker
    registers its memory there) and must not block. It returns why the agent cannot be used, or
    None.
    speaks: whether it says in the log what becomes of the agent.
    """

    def __init__(
        self,
        endpoint: str,
        hello: m.Hello,
        *,
        dead_after_s: float = 1.5,
        on_welcome: Callable[[m.Welcome], str | None] | None = None,
        speaks: bool = True,
    ) -> None:
        self.online = False
        self.welcome: m.Welcome | None = None
        self.refusal: str | None = None
        # As it is to be sent, and as it was sent last.
        self._hello = self._greeting = replace(hello, client_id=uuid.uuid4().hex)
        self._patience = Patience(dead_after_s)
        self._on_welcome = on_welcome
        self._news = AgentNews(speaks)
        self._stop = False
        self._calls = AgentCalls()
        self._socket = transport.AgentSocket(endpoint)
        self._thread = NamedThread("lmcache-redis-link", self._run)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._socket.endpoint

    def submit(
        self,
        kind: type[m.Message],
        listener: Callable[[AgentCall], None] | None = None,
        **fields: Any,
    ) -> AgentCall:
        """Sends ``kind(**fields)``. The call is lost at once if no agent is online."""
        return self.submit_all([kind(call_id=0, **fields)], listener)[0]

    def submit_all(
        self, questions: Sequence[m.Message], listener: Callable[[AgentCall], None] | None = None
    ) -> list[AgentCall]:
        """As `submit`, for questions that go in one message, or a few if they are very many."""
        calls = self._calls.new(len(questions), listener)
        if self.online:
            self._calls.put(questions, calls)
            self._socket.wake()
            if not self._stop or self._thread.is_alive():
                return calls
        lose(calls)  # no agent, or the thread ended before it saw the call
        return calls

    def lost(self, count: int) -> list[AgentCall]:
        """Calls that are lost and were never sent."""
        calls = self._calls.new(count, None)
        lose(calls)
        return calls

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for ``condition``, which is evaluated when a call or the link changes state."""
        with self._calls.changed:
            return self._calls.changed.wait_for(condition, timeout_s)

    def rename(self, suffix: str) -> None:
        """Connects again, as another engine."""
        self._hello = replace(self._hello, engine_id=f"{self._hello.engine_id}/{suffix}")
        self._socket.wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread and closes the connection; pending calls are lost."""
        with self._calls.changed:
            self._stop = True
            self._calls.changed.notify_all()
        self._socket.wake()
        self._thread.join(timeout_s)

    # The methods below run on the link's thread.

    def _run(self) -> None:
        errors = ErrorRow()
        while not self._stop:
            self._go_on(errors)
        was_online = self.online
        self._set_online(False)
        self._calls.lose_all()
        said_goodbye = False
        with contextlib.suppress(zmq.ZMQError):
            said_goodbye = was_online and self._send(m.Goodbye(0))
        self._socket.close(_GOODBYE_S if said_goodbye else 0.0)
        self._on_welcome = None  # it may be of an object that has this link

    def _go_on(self, errors: ErrorRow) -> None:
        try:
            if errors.is_open:
                self._socket.reopen()
                errors.is_open = False
            self._turn()
        except Exception:
            self._broke(errors)

    def _broke(self, errors: ErrorRow) -> None:
        """After an exception: loses the connection, and pauses."""
        pause_s = errors.add(time.monotonic())
        if errors.length == 1:
            logger.exception(
                "the link to the agent at %s failed; computing without the cache until it is "
                "connected again",
                self.endpoint,
            )
        self._set_online(False)
        self._calls.lose_all()
        self.wait_for(lambda: self._stop, pause_s)

    def _turn(self) -> None:
        """Waits for what comes next, for a tick at most, and does what is due."""
        has_messages, has_events = self._socket.wait(_TICK_S)
        if has_messages:
            self._patience.heard()
            for frames in self._socket.received():
                self._received(frames)
        if has_events:
            if not self._socket.connected():
                self._go_offline("it closed the connection")
            elif not self.online:  # else the last HELLO was answered before this was heard
                self._greet()
        self._send_queued()
        now_s = time.monotonic()
        is_silent = self._patience.is_over(now_s)
        unsent_s = now_s - self._socket.sent_s
        if not self.online:
            if unsent_s >= (_TICK_S if self.refusal is None else _REFUSED_TICK_S):
                self._greet()
            self._news.is_absent(self.endpoint, now_s)
        elif is_silent:
            self._reconnect(f"it has been silent for {self._patience.seconds:g} s")
        elif self._greeting.engine_id != self._hello.engine_id:
            self._send(m.Goodbye(0))
            self._reconnect("this engine has another name now", _GOODBYE_S)
        elif unsent_s >= _HEARTBEAT_S:
            self._send(m.Ping(0))

    def _reconnect(self, why: str, linger_s: float = 0.0) -> None:
        self._go_offline(why)
        # Queued messages must not reach a silent agent when it resumes.
        self._socket.reopen(linger_s)

    def _greet(self) -> None:
        reason = transport.why_untrusted(self.endpoint)
        if reason is not None:
            self._socket.sent_s = time.monotonic()
            self._refused(reason)
            return
        self._greeting = replace(self._hello, call_id=next(self._calls.ids))
        self._send(self._greeting)

    def _send(self, message: m.Message) -> bool:
        return self._socket.send(transport.encode(message))

    def _send_queued(self) -> None:
        for calls, frames in self._calls.take_queued():
            try:
                is_sent = self.online and self._socket.send(frames)
            except Exception:
                self._calls.sent(calls)  # they may be; then they are lost with the others
                raise
            if is_sent:
                self._calls.sent(calls)
            else:
                lose(calls)

    def _received(self, frames: Sequence[bytes]) -> None:
        try:
            answer = transport.decode_answer(frames)
        except WireError as error:
            self._refused(str(error))
            return
        if isinstance(answer, m.Welcome) and answer.call_id == self._greeting.call_id:
            self._welcomed(answer)
            return
        self._calls.answered(answer)
        is_known = True
        if isinstance(answer, m.Pong):
            self._patience.is_mapping = answer.mapping
            is_known = answer.known
        elif isinstance(answer, m.Failure):
            is_known = answer.code != m.UNKNOWN_PEER
            if answer.call_id == self._greeting.call_id:
                self._refused(answer.reason, of_this_link=answer.code == m.REFUSED)
        if not is_known and self.online:
            self._go_offline("it was restarted, or has not heard this engine for too long")
            self._greet()

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self.online:
            return  # what is registered is known by the first one
        self.welcome = welcome
        self._news.answers()
        former, self.refusal = self.refusal, None
        self._patience.is_mapping = False
        self._set_online(True)
        self._send(m.Ping(0))  # acknowledges the WELCOME
        if self._on_welcome is not None and (why := self._on_welcome(welcome)) is not None:
            self.refusal = former
            self._refused(why)
            return
        self._news.say(
            logging.INFO,
            "connected to the agent at %s (process %d, chunks of %d tokens)",
            self.endpoint, welcome.agent_pid, welcome.chunk_size_tokens,
        )  # fmt: skip

    def _refused(self, reason: str, *, of_this_link: bool = False) -> None:
        """of_this_link: others of the engine may be accepted, so that it speaks for itself."""
        refusal = f"the agent at {self.endpoint} cannot be used: {reason}"
        if refusal != self.refusal:  # it is told once until the next WELCOME
            self._news.say(logging.ERROR, "%s", refusal, always=of_this_link)
        self.refusal = refusal
        self._news.answers()
        self._set_online(False)
        self._calls.lose_all()

    def _go_offline(self, why: str) -> None:
        if self.online:
            self._news.say(
                logging.WARNING,
                "lost the agent at %s: %s; computing without the cache until it is back",
                self.endpoint, why,
            )  # fmt: skip
        self._set_online(False)
        self._calls.lose_all()

    def _set_online(self, online: bool) -> None:
        with self._calls.changed:
            self.online = online
            self._calls.changed.notify_all()
