"""One client's socket on the loop: receives exactly what is asked for, sends without joining.

Receiving goes from the kernel straight into the caller's buffers, which for a payload are asked
for as its bytes come. While nothing is asked for, one request header at most is read ahead; then
reading pauses, and with it, through TCP, the client.

Sending hands all buffers to the kernel in one `writev`. What it does not take goes on when it
takes more: a small piece is then left to the transport, whose notice that it is out says when.
With TLS everything goes through the transport, piece by piece. Either way no more than one piece
is copied, and when `send` returns the buffers are the caller's again.

What is large moves on a thread of the `Movers`, in both directions, and the loop only waits for
the end of it. Reading is paused meanwhile: the transport does nothing with its socket and cannot
close it under the hands of the thread. With TLS nothing moves there.

With TLS what is received comes through `feed` and is copied, for at the end of a stream both
asyncio and uvloop lose what does not fit into one `get_buffer`. One such portion, as large as
they decrypt at once (256 KiB), is what may be waiting then.

A message under way has to move on: `stalled` says when it did not. While it waits for room, its
client is not to blame. `idle_s` says for how long a client has not begun a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Protocol, cast

from lmcache_redis.gateway.movers import Movers, Transfer

# From this size on a thread is worth the way to it and back.
MOVED_BYTES = 256 << 10
PIECE_BYTES = 64 << 10
# Of a message under way, so much (or what is left) has to move within each stall time-out, and an
# eighth of it where that is more: so none is under way for more than eight of them.
LEAST_PROGRESS_BYTES = 256 << 10
MOST_STALL_TIMEOUTS = 8
_MOST_BUFFERS = 512  # of one writev; the kernel's limit is 1,024


class Gone(ConnectionError):
    """The client closed its side or was lost, or the stream was aborted."""


class Room(Protocol):
    """Where a payload goes, part by part. rest: bytes of it for which there was no room yet."""

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """Room for some of them, in order; none where there is none at once. On any thread."""

    async def next(self, rest: int) -> Sequence[memoryview]:
        """As soon as there is some."""


class Stream(asyncio.BufferedProtocol):
    """See above. At most one `receive` or `send` at a time; the loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ahead_bytes: int, movers: Movers) -> None:
        self._loop = loop
        self._movers = movers
        self._moving: Transfer | None = None
        self._moved: asyncio.Future[Exception | None] | None = None  # the end of that
        self._ahead = memoryview(bytearray(ahead_bytes))
        self._ahead_filled = 0
        self._fed: deque[memoryview] = deque()
        self._wanted: list[memoryview] = []  # the last one is next
        self._left = 0  # bytes of the message under way, either direction
        self._started = False  # a byte of the request came
        self._idle_from_s = loop.time()
        self._watched_from: tuple[float, int] | None = None
        self._least_progress = LEAST_PROGRESS_BYTES
        self._waiter: asyncio.Future[None] | None = None
        self._reading = True
        self._write_paused = False
        self._ended = False
        self.lost: asyncio.Future[None] = loop.create_future()

    # ------------------------------------------------------------ what a connection calls

    async def receive_header(self, header: memoryview) -> None:
        """Fills it with the next request, which may begin at any time, or raises `Gone`."""
        self._left = len(header)
        self._started = False
        self._idle_from_s = self._loop.time()
        await self._fill([header])
        self._watched_from = None

    async def receive_payload(self, nbytes: int, room: Room) -> None:
        """Receives what follows a header to where `room` says, or raises `Gone`."""
        self._left = nbytes
        self._watch()
        while self._left:
            views = room.try_next(self._left)
            if not views:
                views = await self._not_watched(room.next(self._left))
            await self._fill(views, room)
        self._watched_from = None

    @property
    def in_message(self) -> bool:
        """Whether the request that is being received has begun."""
        return self._started

    def idle_s(self, now_s: float) -> float:
        """For how long the client could have begun a request, and has not."""
        return 0.0 if self._started else now_s - self._idle_from_s

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends all buffers in order, or raises `Gone`."""
        left = [memoryview(each) for each in reversed(buffers) if each]
        self._left = sum(map(len, left))
        self._watch()
        while left:
            self._raise_if_gone()
            if self._direct and not self._transport.get_write_buffer_size():
                if self._left >= MOVED_BYTES:
                    await self._move(left[::-1])
                    break
                self._advance(left, self._write_now(left))
                if not left:
                    break
            piece = bytes(left[-1][:PIECE_BYTES])
            self._transport.write(piece)
            self._advance(left, len(piece))
            if self._write_paused:
                await self._wait()
        self._watched_from = None

    def close(self) -> None:
        """Closes when everything sent is out; a client that does not take it is cut off."""
        if not self.lost.done():
            self._left = 1
            self._watch()
        self._transport.close()  # also a lost one: some transports ask for it

    def abort(self) -> None:
        """Closes at once."""
        if self._moving is not None and self._moved is not None:
            # The socket may not be closed, and its number used again, while a thread has it.
            self._movers.cancel(self._moving)
            _tell(self._moved, Gone("the connection was aborted"))
        self._transport.abort()

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether a message under way did not move on for that long. To be asked regularly."""
        if self._watched_from is None:
            return False
        from_s, left = self._watched_from
        left_now = self._left if self._moving is None else self._moving.left
        if left - left_now >= self._least_progress:
            self._watched_from = now_s, left_now
            return False
        return now_s - from_s > timeout_s

    # ------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Any rest that the kernel did not take pauses the writer.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._direct = transport.get_extra_info("ssl_object") is None
        self._fd: int = transport.get_extra_info("socket").fileno()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._wanted[-1] if self._wanted else self._ahead[self._ahead_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if not self._wanted:
            self._ahead_filled += nbytes
            if self._ahead_filled == len(self._ahead):
                self._pause_reading()
            return
        self._count(nbytes)
        self._advance_wanted(nbytes)
        if not self._wanted:
            self._wake()

    def feed(self, data: bytes) -> None:
        """What was received with TLS."""
        self._fed.append(memoryview(data))
        self._use_fed()
        if self._fed:
            self._pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        if self._wanted:
            self._wake(Gone("the client closed its side"))
        # A reply may still be due. TLS cannot do that and closes on its own.
        return self._direct

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._reading = False
        self._watched_from = None
        self._wake(Gone(f"the connection was lost: {exc}"))
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if not self._wanted:
            self._wake()

    # ------------------------------------------------------------ inside

    async def _fill(self, views: Sequence[memoryview], room: Room | None = None) -> None:
        """Fills all views, and where a thread does it those as well that `room` has at once."""
        self._wanted = [*reversed(views)]
        self._use_ahead()
        self._use_fed()
        if self._wanted and room is not None and self._left >= MOVED_BYTES and self._direct:
            left, self._wanted = self._wanted[::-1], []
            await self._move(left, room)
        elif self._wanted:
            self._raise_if_gone(reading=True)
            self._resume_reading()
            await self._wait()

    async def _not_watched(
        self, room: Coroutine[None, None, Sequence[memoryview]]
    ) -> Sequence[memoryview]:
        watched_from, self._watched_from = self._watched_from, None
        asked_s = self._loop.time()
        views = await room
        if watched_from is not None:
            from_s, left = watched_from
            self._watched_from = from_s + self._loop.time() - asked_s, left
        return views

    async def _move(self, buffers: Sequence[memoryview], room: Room | None = None) -> None:
        """Has all buffers moved by a thread. However it ends, they are the caller's again.

        room: they are received, and what it has at once after them; without it they are sent.
        """
        self._raise_if_gone(reading=room is not None)
        self._pause_reading()
        moved: asyncio.Future[Exception | None] = self._loop.create_future()

        def ended(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_tell, moved, error)

        transfer = Transfer(
            self._fd, buffers, sending=room is None, ended=ended,
            left=self._left, more=None if room is None else room.try_next,
        )  # fmt: skip
        self._moving, self._moved = transfer, moved
        try:
            self._movers.begin(transfer)
            # A result, also where it is an error: raised by the future it would refer to itself
            # through this frame, and the buffers of the frames above would wait for the collector.
            error = await moved
        except BaseException:
            self._movers.cancel(transfer)
            raise
        finally:
            self._moving = self._moved = None
            self._left = transfer.left
        if error is None:
            return
        try:
            if isinstance(error, OSError):
                raise Gone(f"the connection was lost: {error.strerror or error}")
            raise error
        finally:
            del error

    def _use_ahead(self) -> None:
        """Moves what was read ahead to where it is wanted now."""
        taken = 0
        while self._wanted and taken < self._ahead_filled:
            nbytes = min(len(self._wanted[-1]), self._ahead_filled - taken)
            self._wanted[-1][:nbytes] = self._ahead[taken : taken + nbytes]
            taken += nbytes
            self._advance_wanted(nbytes)
        if taken:
            rest = bytes(self._ahead[taken : self._ahead_filled])
            self._ahead[: len(rest)] = rest
            self._ahead_filled = len(rest)
            self._count(taken)

    def _use_fed(self) -> None:
        while self._wanted and self._fed:
            source, target = self._fed.popleft(), self._wanted[-1]
            nbytes = min(len(source), len(target))
            target[:nbytes] = source[:nbytes]
            if nbytes < len(source):
                self._fed.appendleft(source[nbytes:])
            self.buffer_updated(nbytes)

    def _count(self, nbytes: int) -> None:
        if not self._started:
            self._started = True
            self._watch()
        self._left -= nbytes

    def _advance_wanted(self, nbytes: int) -> None:
        rest = self._wanted.pop()[nbytes:]
        if rest:
            self._wanted.append(rest)

    def _write_now(self, left: Sequence[memoryview]) -> int:
        """How much the kernel takes at once."""
        try:
            return os.writev(self._fd, left[: -_MOST_BUFFERS - 1 : -1])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise Gone(f"the connection was lost: {error.strerror}") from error

    def _advance(self, left: list[memoryview], nbytes: int) -> None:
        self._left -= nbytes
        while left and nbytes >= len(left[-1]):
            nbytes -= len(left.pop())
        if nbytes:
            left[-1] = left[-1][nbytes:]

    def _watch(self) -> None:
        self._watched_from = self._loop.time(), self._left
        self._least_progress = max(LEAST_PROGRESS_BYTES, self._left // MOST_STALL_TIMEOUTS)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._wanted = []

    def _wake(self, error: Gone | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    def _raise_if_gone(self, *, reading: bool = False) -> None:
        if self.lost.done() or self._transport.is_closing() or (reading and self._ended):
            raise Gone("the client closed its side or was lost")

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()


def _tell(moved: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not moved.done():
        moved.set_result(error)
