"""A call: one message to the agent, from its submission to its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from lmcache_redis.messages import Answer


class CallState(Enum):
    """PENDING until the answer arrives or the agent is lost; LOST calls are never answered."""

    PENDING = "pending"
    ANSWERED = "answered"
    LOST = "lost"


class Call:
    """The state and the answer of one call.

    changed: the condition that is notified when the call ends.
    listener: called with the call when it ends, on the thread that ends it.
    """

    __slots__ = ("_changed", "_listener", "answer", "call_id", "sent", "state")

    def __init__(
        self,
        call_id: int,
        changed: threading.Condition,
        listener: Callable[[Call], None] | None,
    ) -> None:
        self.call_id = call_id
        self.state = CallState.PENDING
        self.answer: Answer | None = None
        self.sent = False  # whether the agent may have received the message
        self._changed = changed
        self._listener = listener

    @property
    def done(self) -> bool:
        """Whether the call is answered or lost."""
        return self.state is not CallState.PENDING

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most ``timeout_s``; returns ``done``."""
        if not self.done and timeout_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: self.done, timeout_s)
        return self.done

    def end(self, answer: Answer | None) -> None:
        """Ends the call: ANSWERED with an answer, LOST with None. Only the link does this."""
        with self._changed:
            self.answer = answer
            self.state = CallState.LOST if answer is None else CallState.ANSWERED
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(self)
