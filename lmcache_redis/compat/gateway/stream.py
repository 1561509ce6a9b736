"""One client's socket on the loop, with or without TLS: exact receives and sends.

Bytes move between the kernel (or TLS) and the caller's buffers in turns: as many as the socket
takes or gives at once, up to `TURN_BYTES`. Turns of large messages run on the threads of a pool,
which would otherwise hold up the loop; a turn waits for a client only while it keeps up, so a slow
one holds no thread. When a receive or send returns or raises, the buffers belong to the caller
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import ssl
import time
from concurrent.futures import Executor

# From this size on, a thread is worth the hop to it and back.
MOVED_BYTES = 256 << 10
TURN_BYTES = 8 << 20
# Most bytes of one system call. It keeps the socket locked, and the peer's acknowledgements wait:
# 32 MiB in one call are a quarter slower.
_PIECE_BYTES = 1 << 20
# A client that moves as much as this between two waits keeps up, and is waited for on the thread.
_KEEPS_UP_BYTES = 64 << 10
_WAIT_MS = 10
# A turn does not wait again after this time: others may need the thread.
_TURN_S = 0.05
# Of a payload, copied behind its header so that both are one call.
_WITH_HEADER_BYTES = 32 << 10
_UNREAD_BYTES = 64 << 10
_NEVER = math.inf
_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Gone(ConnectionError):
    """The client closed its side or was lost, or the stream was aborted."""


class Stream:
    """See the module. At most one receive or send at a time; on the loop's thread only.

    sock: non-blocking; the stream closes it. pool: moves large payloads.
    """

    def __init__(self, sock: socket.socket, pool: Executor) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pool = pool
        self._fd = sock.fileno()
        self._idle_from_s = self._loop.time()  # _NEVER while a request is in flight
        self._moving_from_s = _NEVER
        self._is_read_by_loop = False
        self._readable: asyncio.Future[None] | None = None

    async def start_tls(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Performs the handshake, before any other call. Raises OSError."""
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        try:
            await asyncio.wait_for(self._handshake(self._sock), timeout_s)
        except asyncio.TimeoutError:
            raise Gone(f"no TLS handshake within {timeout_s:g} s") from None

    async def receive_header(self, header: memoryview) -> None:
        """Receives the next request, whenever it comes, or raises `Gone`."""
        self._idle_from_s = self._loop.time()
        if not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            # It has rarely arrived yet; if it has, other clients come first.
            await self._ready(select.EPOLLIN)
        await self._move(header, receiving=True)

    async def receive(self, view: memoryview) -> None:
        """Receives as many bytes of a payload as the view has, or raises `Gone`."""
        await self._move(view, receiving=True)

    async def send(self, header: bytes, payload: memoryview | bytes = b"") -> None:
        """Sends both, or raises `Gone`."""
        payload = memoryview(payload)
        await self._move(memoryview(b"".join((header, payload[:_WITH_HEADER_BYTES]))))
        await self._move(payload[_WITH_HEADER_BYTES:])

    @property
    def in_message(self) -> bool:
        """Whether the request that is being received has begun."""
        return self._idle_from_s == _NEVER

    def idle_s(self, now_s: float) -> float:
        """Seconds since the client could have begun a request; negative if it has."""
        return now_s - self._idle_from_s

    def moving_s(self, now_s: float) -> float:
        """Seconds since the transfer in flight began; negative if there is none."""
        return now_s - self._moving_from_s

    def end_requests(self) -> None:
        """Receives nothing more; replies are still sent."""
        self._shut_down(socket.SHUT_RD)

    def abort(self) -> None:
        """Makes a receive or send in flight, and every later one, raise `Gone`."""
        self._moving_from_s = _NEVER
        if not self.in_message:
            self._idle_from_s = self._loop.time()
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes; sent bytes still arrive. No receive or send may be in flight."""
        if self._is_read_by_loop:
            self._is_read_by_loop = False
            self._loop.remove_reader(self._fd)
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
            except _WAITS as wait:
                events = _events_of(wait, 0)
            await self._ready(events)

    async def _move(self, view: memoryview, *, receiving: bool = False) -> None:
        if self.in_message:
            self._moving_from_s = self._loop.time()
        try:
            while view:
                turn = self._turn_on_thread if len(view) >= MOVED_BYTES else self._turn_here
                moved, events = await turn(view, receiving)
                if moved and not self.in_message:
                    self._idle_from_s, self._moving_from_s = _NEVER, self._loop.time()
                view = view[moved:]
                if events:
                    await self._ready(events)
                elif view:
                    await asyncio.sleep(0)
        except OSError as error:
            if isinstance(error, Gone):
                raise
            raise Gone(f"the connection was lost: {error.strerror or error}") from error
        finally:
            self._moving_from_s = _NEVER

    async def _turn_here(self, view: memoryview, receiving: bool) -> tuple[int, int]:
        return self._turn(view, receiving, waits=False)

    async def _turn_on_thread(self, view: memoryview, receiving: bool) -> tuple[int, int]:
        turn = self._loop.run_in_executor(self._pool, self._turn, view, receiving)
        is_cancelled = False
        while not turn.done():  # the thread uses the buffers until then
            try:
                await asyncio.wait([turn])
            except asyncio.CancelledError:  # noqa: PERF203 - at most once
                is_cancelled = True
                self.abort()
        try:
            if is_cancelled:
                turn.exception()
                raise asyncio.CancelledError
            return turn.result()
        finally:
            del turn  # its error refers to this frame, which would keep the buffers

    def _turn(self, view: memoryview, receiving: bool, waits: bool = True) -> tuple[int, int]:
        """Returns the bytes moved, and the events to wait for; 0: none. Raises OSError.

        waits: for a client that keeps up.
        """
        own = select.EPOLLIN if receiving else select.EPOLLOUT
        call = self._sock.recv_into if receiving else self._sock.send
        moved = moved_before = 0
        most = min(len(view), TURN_BYTES)
        until_s = time.monotonic() + _TURN_S
        while moved < most:
            try:
                nbytes = call(view[moved : moved + _PIECE_BYTES])
            except _WAITS as wait:
                events = _events_of(wait, own)
                keeps_up = waits and moved - moved_before >= _KEEPS_UP_BYTES
                if keeps_up and time.monotonic() < until_s and _is_ready(self._fd, events):
                    moved_before = moved
                    continue
                return moved, events
            except OSError:
                if not moved:
                    raise
                return moved, 0  # the next turn raises
            if not nbytes:
                if not moved:
                    raise Gone("the client closed its side")
                return moved, 0
            moved += nbytes
        return moved, 0

    async def _ready(self, events: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        if events == select.EPOLLOUT:
            self._loop.add_writer(self._fd, _tell, ready)
            try:
                await ready
            finally:
                self._loop.remove_writer(self._fd)
            return
        if not self._is_read_by_loop:
            self._is_read_by_loop = True
            self._loop.add_reader(self._fd, self._can_be_read)
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
            self._loop.remove_reader(self._fd)

    def _shut_down(self, how: int) -> None:
        # Not the method of SSLSocket: it would continue without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, how)


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _events_of(wait: OSError, own: int) -> int:
    """What a socket that would block must be ready for. own: the answer without TLS."""
    if isinstance(wait, ssl.SSLWantReadError):
        return select.EPOLLIN
    return select.EPOLLOUT if isinstance(wait, ssl.SSLWantWriteError) else own


def _is_ready(fd: int, events: int) -> bool:
    """Waits a moment. On a thread."""
    poll = select.poll()
    poll.register(fd, events)  # EPOLLIN and EPOLLOUT are POLLIN and POLLOUT
    return bool(poll.poll(_WAIT_MS))
