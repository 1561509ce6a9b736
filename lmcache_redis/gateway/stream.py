"""One client's socket on the loop, with TLS or without: exact receives, sends without joins.

Bytes go from the kernel (or from TLS) straight into the caller's buffers and out of them. Large
transfers move on threads of the `Movers`, in both directions; the loop gives all others their turns
when the socket is ready. When a receive or send returns, however it ends, the buffers are the
caller's again.

A message in flight has to make progress: `stalled` says when it did not. Time in which it waits
for room is not the client's. `idle_s` says for how long a client has not begun a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from lmcache_redis.gateway.movers import TURN_BYTES, WAITS, Channel, Movers, Transfer, events_of

# From this size on a thread is worth the hop to it and back.
MOVED_BYTES = 256 << 10
# Of a message in flight, so much (or all that is left) has to move within each stall timeout, and
# an eighth of it where that is more: so none is in flight for more than eight of them.
LEAST_PROGRESS_BYTES = 256 << 10
MOST_STALL_TIMEOUTS = 8
_UNREAD_BYTES = 64 << 10
_NEVER = math.inf


class Gone(ConnectionError):
    """The client closed its side or was lost, or the stream was aborted."""


class Room(Protocol):
    """Where a payload goes, part by part. rest: bytes of it for which there was no room yet."""

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """Room for some of them, in order; none where there is none at once. On any thread."""

    async def next(self, rest: int) -> Sequence[memoryview]:
        """As soon as there is some."""


class Stream:
    """See above. At most one `receive` or `send` at a time; the loop's thread only.

    sock: must not block; the stream closes it.
    """

    def __init__(self, sock: socket.socket, movers: Movers) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._channel = Channel(sock)
        self._movers = movers
        self._transfer: Transfer | None = None
        self._idle_from_s = self._loop.time()  # _NEVER: a request has begun
        self._watched_from_s = _NEVER
        self._watched_left = 0  # bytes at that time
        self._least_progress_bytes = LEAST_PROGRESS_BYTES
        self._is_read_by_loop = False
        self._readable: asyncio.Future[None] | None = None

    async def start_tls(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """The handshake, before anything else. Raises OSError."""
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        self._channel = Channel(self._sock)
        try:
            await asyncio.wait_for(self._handshake(self._sock), timeout_s)
        except asyncio.TimeoutError:
            raise Gone(f"no TLS handshake within {timeout_s:g} s") from None

    async def receive_header(self, header: memoryview) -> None:
        """Fills it with the next request, which may begin at any time, or raises `Gone`."""
        self._idle_from_s = self._loop.time()
        if not self._channel.decrypted_bytes():
            # Most often it is not there yet; if it is, other clients come first.
            await self._ready(select.EPOLLIN)
        await self._move(Transfer(self._channel, [header], sending=False))
        self._idle_from_s = self._watched_from_s = _NEVER

    async def receive_payload(self, nbytes: int, room: Room) -> None:
        """Receives what follows a header to where `room` says, or raises `Gone`."""
        left = nbytes
        self._watch(left)
        while left:
            if not (views := room.try_next(left)):
                from_s, self._watched_from_s = self._watched_from_s, _NEVER
                from_s -= self._loop.time()
                views = await room.next(left)
                self._watched_from_s = from_s + self._loop.time()
            transfer = Transfer(self._channel, views, sending=False, left=left, more=room.try_next)
            await self._move(transfer)
            left = transfer.left
        self._watched_from_s = _NEVER

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends all buffers in order, or raises `Gone`."""
        views = [memoryview(each) for each in buffers]
        transfer = Transfer(self._channel, views, sending=True)
        self._watch(transfer.left)
        await self._move(transfer)
        self._watched_from_s = _NEVER

    @property
    def in_message(self) -> bool:
        """Whether the request that is being received has begun."""
        return self._idle_from_s == _NEVER

    def idle_s(self, now_s: float) -> float:
        """For how long the client could have begun a request, and has not; negative: it has."""
        return now_s - self._idle_from_s

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether a message in flight made no progress for that long. To be asked regularly."""
        if self._watched_from_s == _NEVER or self._transfer is None:
            return False
        left = self._transfer.left
        if self._watched_left - left >= self._least_progress_bytes:
            self._watched_from_s, self._watched_left = now_s, left
        return now_s - self._watched_from_s > timeout_s

    def end_requests(self) -> None:
        """What has not come yet is not received any more; replies are sent."""
        self._shut_down(socket.SHUT_RD)

    def abort(self) -> None:
        """A receive or send in flight raises `Gone` soon, and so does every later one."""
        self._watched_from_s = _NEVER
        if not self.in_message:
            self._idle_from_s = self._loop.time()
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes; what was sent still arrives. No receive or send may be in flight."""
        if self._is_read_by_loop:
            self._is_read_by_loop = False
            self._loop.remove_reader(self._channel.fd)
        with contextlib.suppress(OSError, ValueError):
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.unwrap()  # says that this is the end; the client's answer is not read
        with contextlib.suppress(OSError):
            # To close with bytes unread is a reset, which takes replies from the client.
            socket.socket.recv(self._sock, _UNREAD_BYTES)
        self._sock.close()

    # ------------------------------------------------------------ inside

    async def _handshake(self, sock: ssl.SSLSocket) -> None:
        while True:
            try:
                return sock.do_handshake()
            except WAITS as wait:
                events = events_of(wait, 0)
            await self._ready(events)

    async def _move(self, transfer: Transfer) -> None:
        self._transfer, nbytes = transfer, transfer.left
        is_large = nbytes >= MOVED_BYTES
        try:
            while not transfer.turn(0 if is_large else TURN_BYTES):
                if is_large:
                    return await self._move_on_thread(transfer)
                if self._watched_from_s == _NEVER and transfer.left < nbytes:
                    self._idle_from_s = _NEVER
                    self._watch(transfer.left)
                await self._ready(transfer.events)
        except OSError as error:
            raise Gone(f"the connection was lost: {error.strerror or error}") from error
        finally:
            self._transfer = None  # it refers to buffers
            if transfer.left < nbytes:
                self._idle_from_s = _NEVER

    async def _move_on_thread(self, transfer: Transfer) -> None:
        moved: asyncio.Future[None] = self._loop.create_future()
        self._movers.begin(transfer, partial(self._loop.call_soon_threadsafe, _tell, moved))
        is_cancelled = False
        while not moved.done():  # until then a thread uses the buffers
            try:
                await asyncio.wait([moved])
            except asyncio.CancelledError:  # noqa: PERF203 - once, if at all
                is_cancelled = True
                self.abort()
        error, transfer.error = transfer.error, None
        try:
            if is_cancelled:
                raise asyncio.CancelledError
            if error is not None:
                raise error
        finally:
            del error  # it refers to this frame: buffers would wait for the garbage collector

    async def _ready(self, events: int) -> None:
        """Returns when the socket is ready for it."""
        ready: asyncio.Future[None] = self._loop.create_future()
        if events == select.EPOLLOUT:
            self._loop.add_writer(self._channel.fd, _tell, ready)
            try:
                await ready
            finally:
                self._loop.remove_writer(self._channel.fd)
            return
        if not self._is_read_by_loop:
            self._is_read_by_loop = True
            self._loop.add_reader(self._channel.fd, self._can_be_read)
        self._readable = ready
        try:
            await ready
        finally:
            self._readable = None

    def _can_be_read(self) -> None:
        """Stays registered between requests, to save system calls, until no receive waits."""
        if self._readable is not None:
            _tell(self._readable)
        else:
            self._is_read_by_loop = False
            self._loop.remove_reader(self._channel.fd)

    def _watch(self, left: int) -> None:
        self._watched_from_s, self._watched_left = self._loop.time(), left
        self._least_progress_bytes = max(LEAST_PROGRESS_BYTES, left // MOST_STALL_TIMEOUTS)

    def _shut_down(self, how: int) -> None:
        # Not the method of SSLSocket: that would continue without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, how)


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
