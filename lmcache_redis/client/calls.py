"""Calls: messages to the agent, from their submission to their answers.

Any thread submits them and waits for them; only the link's thread sends and ends them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from msgspec.structs import replace

from lmcache_redis import messages as m
from lmcache_redis import transport

Batch = tuple[Sequence["AgentCall"], list[bytes]]


class CallState(Enum):
    """PENDING until the answer arrives or the agent is lost; LOST calls are never answered."""

    PENDING = "pending"
    ANSWERED = "answered"
    LOST = "lost"


class AgentCall:
    """One message to the agent, from its submission to its answer.

    changed: the condition that is notified when the call ends.
    listener: called with the call when it ends, on the thread that ends it.
    """

    __slots__ = ("_changed", "_listener", "answer", "call_id", "sent", "state")

    def __init__(
        self,
        call_id: int,
        changed: threading.Condition,
        listener: Callable[[AgentCall], None] | None,
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


class AgentCalls:
    """The calls of one link: those to be sent, and those that wait for an answer.

    changed: notified when a call ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._ids = itertools.count(1)
        self._outbox: deque[Batch] = deque()
        self._pending: dict[int, AgentCall] = {}

    def next_id(self) -> int:
        return next(self._ids)

    def new(self, count: int, listener: Callable[[AgentCall], None] | None) -> list[AgentCall]:
        return [AgentCall(self.next_id(), self.changed, listener) for _ in range(count)]

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
    """Ends those of the calls that have not ended, as LOST."""
    for call in calls:
        if not call.done:
            call.end(None)
