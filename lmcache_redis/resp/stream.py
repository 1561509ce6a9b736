"""A connected socket that keeps deadlines: plain (the kernel does) and TLS (Python does).

`PlainStream` works on a blocking socket with SO_RCVTIMEO and SO_SNDTIMEO: one system call
moves a whole stripe, without the GIL and without a poll before it. An SSLSocket has neither
recvmsg_into nor sendmsg and would spin on those options, so `TlsStream` is generic loops.

The deadline is one for all calls until the next `arm`, however many bytes each of them brings:
`_limit` looks at the clock before every system call, and gives the kernel what is left where it
has more. Either stream raises RedisTimeout when the deadline passes and RedisUnavailable when the
connection is lost, and is of no use after that: its owner closes it. One thread uses a
stream; `abort` may come from any thread and makes whatever is under way fail at once.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from lmcache_redis.errors import RedisError, RedisTimeout, RedisUnavailable

Buffer = bytes | bytearray | memoryview

# A deadline may be overrun by as much: it saves a system call for every stripe.
_SLACK_S = 0.005
_LEAST_TIMEOUT_S = 0.001
_TLS_SEND_BYTES = 256 << 10
_TIMEVAL = struct.Struct("@ll")


class Stream(Protocol):
    """What `BulkConnection` needs of a connected socket."""

    def arm(self, deadline: float) -> None:
        """Everything until the next call ends by `deadline`, and within one op time-out."""

    def send(self, parts: Sequence[Buffer], nbytes: int) -> None:
        """Send all parts, `nbytes` together."""

    def send_at_once(self, part: Buffer) -> int:
        """Send what can be sent without waiting; how many bytes, none where it is lost."""

    def receive_some(self, view: memoryview) -> int:
        """Receive at least one byte, at most the view; says how many."""

    def receive_exactly(self, parts: Sequence[memoryview], nbytes: int) -> None:
        """Fill all parts, `nbytes` together."""

    def is_quiet(self) -> bool:
        """Whether nothing has come unasked: neither bytes nor the end of the connection."""

    def plain_fileno(self) -> int:
        """A descriptor on which payloads are as they are; -1 where something lies between."""

    def send_rest(self, parts: Sequence[Buffer], sent: int) -> None:
        """Send what is left of parts of which `sent` bytes were."""

    def lost(self, error_number: int) -> RedisError:
        """What to raise for an errno that somebody else met on the socket (0: it was closed)."""

    def abort(self) -> None:
        """Wake whoever waits on this stream. From any thread, at any time, any number of times."""

    def close(self) -> None:
        """Give the socket back. Does nothing the second time."""


class SocketStream:
    """A socket that one thread uses and may close while another shuts it down; its deadline."""

    __slots__ = ("_deadline", "_lock", "_op_timeout_s", "_sock", "_where")

    def __init__(self, sock: socket.socket, where: str, op_timeout_s: float) -> None:
        self._sock = sock
        self._where = where
        self._op_timeout_s = op_timeout_s
        self._deadline = 0.0
        self._lock = threading.Lock()

    def connect(self, address: Any, deadline: float) -> None:
        """Raises OSError; TimeoutError where the deadline passes."""
        self._sock.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
        self._sock.connect(address)

    def arm(self, deadline: float) -> None:
        now = time.monotonic()
        self._deadline = min(now + self._op_timeout_s, deadline)
        if self._deadline <= now:
            raise self._late()

    def _left(self) -> float:
        """Seconds until the deadline, which has not passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        return left

    def is_quiet(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        with self._lock:
            if self._sock.fileno() >= 0:
                try:
                    # Not unwrap(): a TLS goodbye could wait for the peer.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
                except OSError as error:
                    if error.errno not in (errno.ENOTCONN, errno.EINVAL):
                        raise

    def close(self) -> None:
        # Under the lock: a descriptor closed here must not be shut down as somebody else's.
        with self._lock:
            self._sock.close()

    def lost(self, error_number: int) -> RedisError:
        return self._lost(
            OSError(error_number, os.strerror(error_number)) if error_number else None
        )

    def _lost(self, error: OSError | None = None) -> RedisError:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            return self._late()
        why = "it was closed by the server" if error is None else error.strerror or str(error)
        return RedisUnavailable(f"the connection to Redis at {self._where} was lost: {why}")

    def _late(self) -> RedisTimeout:
        return RedisTimeout(f"Redis at {self._where} did not answer in time")


class PlainStream(SocketStream):
    """TCP and unix sockets. Takes over `sock`, which is connected, or is to be."""

    __slots__ = ("_is_unix", "_recv_into", "_recvmsg_into", "_sendmsg", "_timeout_s")

    def __init__(self, sock: socket.socket, where: str, op_timeout_s: float) -> None:
        super().__init__(sock, where, op_timeout_s)
        sock.settimeout(None)
        self._timeout_s = 0.0
        self._is_unix = sock.family == socket.AF_UNIX
        self._recv_into = sock.recv_into
        self._recvmsg_into = sock.recvmsg_into
        self._sendmsg = sock.sendmsg

    def connect(self, address: Any, deadline: float) -> None:
        super().connect(address, deadline)
        self._sock.settimeout(None)

    def send(self, parts: Sequence[Buffer], nbytes: int) -> None:
        sent = self._send_some(parts)
        if sent != nbytes:
            self.send_rest(parts, sent)

    def send_rest(self, parts: Sequence[Buffer], sent: int) -> None:
        views = _after(parts, sent)
        while views:
            views = _after(views, self._send_some(views))

    def send_at_once(self, part: Buffer) -> int:
        try:
            return self._sendmsg((part,), (), socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def plain_fileno(self) -> int:
        return self._sock.fileno()

    def receive_some(self, view: memoryview) -> int:
        self._limit()
        try:
            received = self._recv_into(view)
        except OSError as error:
            raise self._lost(error) from None
        if received == 0:
            raise self._lost()
        return received

    def receive_exactly(self, parts: Sequence[memoryview], nbytes: int) -> None:
        received = self._receive_most(parts)
        if received != nbytes:
            # It met a signal, the end of its time or of the connection.
            views = _after(parts, received)
            while views:
                views = _after(views, self._receive_most(views))

    def _receive_most(self, parts: Sequence[memoryview]) -> int:
        """One call, which fills all parts unless it is cut short; at least a byte."""
        self._limit()
        try:
            received = self._recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise self._lost(error) from None
        if received == 0:
            raise self._lost()
        return received

    def _send_some(self, parts: Sequence[Buffer]) -> int:
        try:
            if not self._is_unix:
                self._limit()
                return self._sendmsg(parts)
            # For each piece of some 32 KiB that it sends, a unix socket would wait anew.
            while True:
                left = self._left()
                try:
                    return self._sendmsg(parts, (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._sock, select.POLLOUT)
                    poll.poll(left * 1e3)
        except OSError as error:
            raise self._lost(error) from None

    def _limit(self) -> None:
        """Let no system call take longer than until the deadline, or much less."""
        left = self._left()
        if not left * 0.9 <= self._timeout_s <= left + _SLACK_S:
            self._set_timeout(max(left, _LEAST_TIMEOUT_S))

    def _set_timeout(self, seconds: float) -> None:
        whole, part = divmod(seconds, 1.0)
        timeval = _TIMEVAL.pack(int(whole), int(part * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        except OSError as error:
            raise self._lost(error) from None
        self._timeout_s = seconds


class TlsStream(SocketStream):
    """TLS: one call a record, time-outs by Python. Takes over `sock`, as `PlainStream` does."""

    __slots__ = ("_tls",)

    def __init__(self, sock: ssl.SSLSocket, where: str, op_timeout_s: float) -> None:
        super().__init__(sock, where, op_timeout_s)
        self._tls = sock

    def connect(self, address: Any, deadline: float) -> None:
        super().connect(address, deadline)
        self._tls.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
        # Its time-out is one for all of it.
        self._tls.do_handshake()

    def send(self, parts: Sequence[Buffer], nbytes: int) -> None:
        # Small parts go together: every send is a record, and often a packet, of its own.
        small = b""
        for part in parts:
            view = memoryview(part)
            if view.nbytes <= 4096:
                small += view
                continue
            self._send_view(memoryview(small))
            self._send_view(view)
            small = b""
        self._send_view(memoryview(small))

    def send_at_once(self, part: Buffer) -> int:
        return 0

    def plain_fileno(self) -> int:
        return -1

    def send_rest(self, parts: Sequence[Buffer], sent: int) -> None:
        for view in _after(parts, sent):
            self._send_view(view)

    def receive_some(self, view: memoryview) -> int:
        try:
            self._tls.settimeout(self._left())
            received = self._tls.recv_into(view)
        except OSError as error:
            raise self._lost(error) from None
        if received == 0:
            raise self._lost()
        return received

    def receive_exactly(self, parts: Sequence[memoryview], nbytes: int) -> None:
        for part in parts:
            view = part
            while view.nbytes:
                view = view[self.receive_some(view) :]

    def _send_view(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                self._tls.settimeout(self._left())
                sent = self._tls.send(view[:_TLS_SEND_BYTES])
            except OSError as error:
                raise self._lost(error) from None
            view = view[sent:]


def _after(parts: Sequence[Buffer], nbytes: int) -> list[memoryview]:
    """Views of what is left of `parts` without their first `nbytes` bytes; no copies."""
    left: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        if nbytes < view.nbytes:
            left.append(view.cast("B")[nbytes:])
        nbytes = max(0, nbytes - view.nbytes)
    return left
