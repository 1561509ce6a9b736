"""A socket that is connected to the agent as soon as there is one, and replaced at will."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_redis import transport


class AgentSocket:
    """A DEALER with its monitor. Used by one thread, but for ``wake``.

    sent_s: when it last sent, or tried to. heard_s: when the agent was last heard; a link sets it.
    Both are of `time.monotonic()`.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.sent_s = 0.0
        self.heard_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = transport.Wakeup()
        self._open()

    def wake(self) -> None:
        """Ends `wait` at once. From any thread, also after `close`."""
        self._wakeup.set()

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        """Waits for something to come, or `wake`; whether messages are there, and events."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        return self._socket in ready, self._monitor in ready

    def send(self, frames: list[bytes]) -> bool:
        """Sends a message; False if there is no agent, or it does not read."""
        self.sent_s = time.monotonic()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self) -> Iterator[list[bytes]]:
        """The messages that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv_multipart(zmq.NOBLOCK)

    def connected(self) -> bool | None:
        """The next event: whether the agent is there now; None for any other."""
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return True
        return False if event == zmq.EVENT_DISCONNECTED else None

    def reopen(self, linger_s: float = 0.0) -> None:
        """Another socket in its place. linger_s: how long what was sent last may take."""
        self._close(linger_s)
        self._open()

    def close(self, linger_s: float = 0.0) -> None:
        self._close(linger_s)
        self._context.term()
        self._wakeup.close()

    def _open(self) -> None:
        self._socket, self._monitor = transport.connect_watched_dealer(self._context, self.endpoint)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)

    def _close(self, linger_s: float) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
