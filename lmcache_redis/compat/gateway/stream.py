"""One client's socket on the loop, with or without TLS: exact receives and sends with a deadline.

Bytes move between the kernel (or TLS) and the caller's buffers in turns: as many as the socket
takes or gives at once. Turns of large messages run on the threads of a pool, which would otherwise
hold up the loop; a turn waits for a client only while it keeps up, and ends after `_TURN_S`, so a
slow client holds no thread. When a receive or send returns or raises, the buffers belong to the
caller again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Executor

# From this size on, a thread is worth the hop to it and back.
MOVED_BYTES = 256 << 10
# Most bytes of one system call. It keeps the socket locked, and the peer's acknowledgements wait:
# 32 MiB in one call are a quarter slower.
_PIECE_BYTES = 1 << 20
# A client that moves as much as this between two waits keeps up, and is waited for on the thread.
_KEEPS_UP_BYTES = 64 << 10
_WAIT_MS = 10
_TURN_S = 0.05
# Of a payload, copied behind its header so that both are one call.
_WITH_HEADER_BYTES = 32 << 10
_UNREAD_BYTES = 64 << 10
_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Gone(ConnectionError):
    """The client closed its side or was lost, or the stream was aborted."""


class ClientStream:
    """See the module. At most one receive or send at a time; on the loop's thread only.

    sock: non-blocking; the stream closes it. pool: moves large payloads. timeout_s: for a header
    from its first byte, a payload or a reply; then the stream is aborted, and on_stall is called.
    """

    def __init__(
        self,
        sock: socket.socket,
        pool: Executor,
        timeout_s: float = 60.0,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pool = pool
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._fd = sock.fileno()
        self._idle_from_s = self._loop.time()  # infinite while a request is in flight

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Performs the handshake, before any other call. Raises OSError."""
        self._sock = sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        stall = self._loop.call_later(self._timeout_s, self.abort)
        try:
            while True:
                try:
                    return sock.do_handshake()
                except _WAITS as wait:
                    events = _events_of(wait, 0)
                await self._ready(events)
        finally:
            stall.cancel()

    async def receive_header(self, header: memoryview) -> None:
        """Receives the next request, whenever it comes, or raises `Gone`."""
        self._idle_from_s = self._loop.time()
        if not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            # It has rarely arrived yet; if it has, other clients come first.
            await self._ready(select.EPOLLIN)
        await self.receive(header)

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
        return self._idle_from_s == math.inf

    def idle_s(self) -> float:
        """Seconds since the client could have begun a request; negative if it has."""
        return self._loop.time() - self._idle_from_s

    def end_requests(self) -> None:
        """Receives nothing more; replies are still sent."""
        self._shut_down(socket.SHUT_RD)

    def abort(self) -> None:
        """Makes a receive or send in flight, and every later one, raise `Gone`."""
        if not self.in_message:
            self._idle_from_s = self._loop.time()
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes; sent bytes still arrive. No receive or send may be in flight."""
        with contextlib.suppress(OSError, ValueError):
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.unwrap()  # sends close_notify and does not wait for the client's
        with contextlib.suppress(OSError):
            # Closing with unread bytes resets the connection, and the client loses replies.
            socket.socket.recv(self._sock, _UNREAD_BYTES)
        self._sock.close()

    async def _move(self, view: memoryview, *, receiving: bool = False) -> None:
        stall: asyncio.TimerHandle | None = None
        try:
            while view:
                if len(view) >= MOVED_BYTES:
                    moved, events = await self._turn_on_thread(view, receiving)
                else:
                    moved, events = self._turn(view, receiving, waits=False)
                view = view[moved:]
                if view and self.in_message:  # small messages need no timer
                    stall = stall or self._loop.call_later(self._timeout_s, self._stalled)
                if view:
                    await (self._ready(events) if events else asyncio.sleep(0))
        except Gone:
            raise
        except OSError as error:
            raise Gone(f"the connection was lost: {error.strerror or error}") from error
        finally:
            if stall is not None:
                stall.cancel()

    def _stalled(self) -> None:
        self._on_stall()
        self.abort()

    async def _turn_on_thread(self, view: memoryview, receiving: bool) -> tuple[int, int]:
        turn = self._loop.run_in_executor(self._pool, self._turn, view, receiving)
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            self.abort()
            await asyncio.wait([turn])  # the thread uses the buffers until then
            raise
        finally:
            del turn  # its error refers to this frame, which would keep the buffers

    def _turn(self, view: memoryview, receiving: bool, waits: bool = True) -> tuple[int, int]:
        """Returns the bytes moved, and the events to wait for; 0: none. Raises OSError.

        waits: for a client that keeps up.
        """
        own = select.EPOLLIN if receiving else select.EPOLLOUT
        call = self._sock.recv_into if receiving else self._sock.send
        moved = moved_before = 0
        until_s = time.monotonic() + _TURN_S
        while moved < len(view) and time.monotonic() < until_s:
            try:
                nbytes = call(view[moved : moved + _PIECE_BYTES])
            except _WAITS as wait:  # noqa: PERF203
                events = _events_of(wait, own)
                if not waits or moved - moved_before < _KEEPS_UP_BYTES:
                    return moved, events
                moved_before = moved
                poll = select.poll()
                poll.register(self._fd, events)  # EPOLLIN and EPOLLOUT are POLLIN and POLLOUT
                if not poll.poll(_WAIT_MS):
                    return moved, events
            else:
                if not nbytes:
                    raise Gone("the client closed its side")
                moved += nbytes
                self._idle_from_s = math.inf
        return moved, 0

    async def _ready(self, events: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        if events == select.EPOLLOUT:
            add, remove = self._loop.add_writer, self._loop.remove_writer
        else:
            add, remove = self._loop.add_reader, self._loop.remove_reader
        add(self._fd, _tell, ready)
        try:
            await ready
        finally:
            remove(self._fd)

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
