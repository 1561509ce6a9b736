"""One client's socket on the loop, with or without TLS: exact receives, gathered sends.

Bytes move between the kernel (or TLS) and the caller's buffers without a copy in between. Threads
of the `Movers` move large transfers in both directions; the loop moves the others when the socket
is ready. When a receive or send returns or raises, the buffers belong to the caller again.

A message in flight has to make progress: `stalled` tells when it does not. Time that it spends
waiting for room does not count. `idle_s` tells how long a client has not begun a request.
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

from lmcache_redis.compat.gateway.movers import (
    TURN_BYTES,
    WAITS,
    Channel,
    Movers,
    Transfer,
    events_of,
)

# From this size on, a thread is worth the hop to it and back.
MOVED_BYTES = 256 << 10
# Within each stall timeout a message has to move this much, or an eighth of its length if that is
# more, or its rest. So no message is in flight for more than eight stall timeouts.
LEAST_PROGRESS_BYTES = 256 << 10
MOST_STALL_TIMEOUTS = 8
_UNREAD_BYTES = 64 << 10
_NEVER = math.inf


class Gone(ConnectionError):
    """The client closed its side or was lost, or the stream was aborted."""


class Room(Protocol):
    """Memory for a payload, granted part by part. rest: bytes that have no room yet."""

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """Room for the next bytes, in order; empty if none is free now. On any thread."""

    async def next(self, rest: int) -> Sequence[memoryview]:
        """As `try_next`; waits until there is some."""


class Stream:
    """See the module. At most one receive or send at a time; on the loop's thread only.

    sock: non-blocking; the stream closes it.
    """

    def __init__(self, sock: socket.socket, movers: Movers) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._channel = Channel(sock)
        self._movers = movers
        self._transfer: Transfer | None = None
        self._idle_from_s = self._loop.time()  # _NEVER while a request is in flight
        self._watched_from_s = _NEVER
        self._watched_left = 0  # bytes left at `_watched_from_s`
        self._least_progress_bytes = LEAST_PROGRESS_BYTES
        self._is_read_by_loop = False
        self._readable: asyncio.Future[None] | None = None

    async def start_tls(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Performs the handshake, before any other call. Raises OSError."""
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        self._channel = Channel(self._sock)
        try:
            await asyncio.wait_for(self._handshake(self._sock), timeout_s)
        except asyncio.TimeoutError:
            raise Gone(f"no TLS handshake within {timeout_s:g} s") from None

    async def receive_header(self, header: memoryview) -> None:
        """Receives the next request, whenever it comes, or raises `Gone`."""
        self._idle_from_s = self._loop.time()
        if not self._channel.decrypted_bytes():
            # It has rarely arrived yet; if it has, other clients come first.
            await self._ready(select.EPOLLIN)
        await self._move(Transfer(self._channel, [header], sending=False))
        self._idle_from_s = self._watched_from_s = _NEVER

    async def receive_payload(self, nbytes: int, room: Room) -> None:
        """Receives a payload into the memory that `room` grants, or raises `Gone`."""
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
        """Seconds since the client could have begun a request; negative if it has."""
        return now_s - self._idle_from_s

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether a message in flight made too little progress. To be called regularly."""
        if self._watched_from_s == _NEVER or self._transfer is None:
            return False
        left = self._transfer.left
        if self._watched_left - left >= self._least_progress_bytes:
            self._watched_from_s, self._watched_left = now_s, left
        return now_s - self._watched_from_s > timeout_s

    def end_requests(self) -> None:
        """Receives nothing more; replies are still sent."""
        self._shut_down(socket.SHUT_RD)

    def abort(self) -> None:
        """Makes a receive or send in flight, and every later one, raise `Gone`."""
        self._watched_from_s = _NEVER
        if not self.in_message:
            self._idle_from_s = self._loop.time()
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes; sent bytes still arrive. No receive or send may be in flight."""
        if self._is_read_by_loop:
            self._is_read_by_loop = False
            self._loop.remove_reader(self._channel.fd)
        with contextlib.suppress(OSError, ValueError):
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.unwrap()  # sends close_notify and does not wait for the client's
        with contextlib.suppress(OSError):
            # Closing with unread bytes resets the connection, and the client loses replies.
            socket.socket.recv(self._sock, _UNREAD_BYTES)
        self._sock.close()

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
        while not moved.done():  # a thread uses the buffers until then
            try:
                await asyncio.wait([moved])
            except asyncio.CancelledError:  # noqa: PERF203 - at most once
                is_cancelled = True
                self.abort()
        error, transfer.error = transfer.error, None
        try:
            if is_cancelled:
                raise asyncio.CancelledError
            if error is not None:
                raise error
        finally:
            del error  # a reference cycle with this frame would keep the buffers

    async def _ready(self, events: int) -> None:
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
        """Stays registered between requests, which saves system calls; removed if none waits."""
        if self._readable is not None:
            _tell(self._readable)
        else:
            self._is_read_by_loop = False
            self._loop.remove_reader(self._channel.fd)

    def _watch(self, left: int) -> None:
        self._watched_from_s, self._watched_left = self._loop.time(), left
        self._least_progress_bytes = max(LEAST_PROGRESS_BYTES, left // MOST_STALL_TIMEOUTS)

    def _shut_down(self, how: int) -> None:
        # Not the method of SSLSocket: it would continue without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, how)


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
