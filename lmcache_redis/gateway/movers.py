"""Threads that move large payloads between sockets and buffers, so that the loop does not.

The kernel copies payloads, and while it does the thread that asked it can do nothing else. So the
loop leaves that to a few threads here. They share one epoll: a transfer is armed for one event,
whichever thread gets that moves as much as the socket takes or gives at once, up to a turn, and
arms it again. A slow client costs an entry in the epoll and holds no thread; several fast ones
take turns.

A transfer has a lock, which a thread holds for its turn, and which is all there is: nobody waits
for the transfer of somebody else. It ends when all bytes have moved or there is nowhere to put
more, with the client, or with `cancel`: then no thread uses its buffers or its socket any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence

# So much in one call into the kernel: one that takes long keeps the socket locked meanwhile,
# and what the other side acknowledges has to wait (32 MiB at once are a quarter slower).
PIECE_BYTES = 1 << 20
_TURN_BYTES = 2 << 20
_MOST_BUFFERS = 512  # of one call; the kernel's limit is 1,024

Ended = Callable[[Exception | None], None]
More = Callable[[int], Sequence[memoryview]]


class Transfer:
    """One payload on its way. left: bytes to go; any thread may read it.

    buffers: in order; the client ends it with ConnectionError. ended: called once, on a thread of
    the movers, unless the transfer was cancelled; it may not block. more: called there too, where
    `left` is more than the buffers hold and they are full; if it gives none, the transfer ends.
    """

    def __init__(
        self,
        fd: int,
        buffers: Sequence[memoryview],
        *,
        sending: bool,
        ended: Ended,
        left: int | None = None,
        more: More | None = None,
    ) -> None:
        self.fd = fd
        self.left = sum(map(len, buffers)) if left is None else left
        self.ended = ended
        self.more = more
        self.is_short = False  # of buffers
        self.events = (select.EPOLLOUT if sending else select.EPOLLIN) | select.EPOLLONESHOT
        self.lock = threading.Lock()
        self.is_cancelled = False
        self.is_over = False  # under the lock
        self._call = os.writev if sending else os.readv
        self._buffers = [each for each in reversed(buffers) if each]  # the last one is next

    def turn(self) -> None:
        """Move what can be moved now. Raises OSError when the client is gone."""
        until = max(0, self.left - _TURN_BYTES)
        while self.left > until and not self.is_cancelled:
            if not self._buffers and not self._has_more():
                return
            try:
                moved = self._call(self.fd, self._piece())
            except BlockingIOError:
                return
            if not moved:
                raise ConnectionError("the client closed its side")
            self._advance(moved)

    def _has_more(self) -> bool:
        self._buffers = [] if self.more is None else [*reversed(self.more(self.left))]
        self.is_short = not self._buffers
        return not self.is_short

    def _piece(self) -> list[memoryview]:
        piece: list[memoryview] = []
        room = PIECE_BYTES
        for buffer in self._buffers[: -_MOST_BUFFERS - 1 : -1]:
            piece.append(buffer[:room])
            room -= len(piece[-1])
            if not room:
                break
        return piece

    def _advance(self, nbytes: int) -> None:
        self.left -= nbytes
        while self._buffers and nbytes >= len(self._buffers[-1]):
            nbytes -= len(self._buffers.pop())
        if nbytes:
            self._buffers[-1] = self._buffers[-1][nbytes:]

    def let_go(self) -> None:
        """Refer to the buffers no longer."""
        self._buffers.clear()
        self.more = None


class Movers:
    """Thread-safe. The sockets do not block, and nobody else reads or writes them meanwhile."""

    def __init__(self, threads: int) -> None:
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._transfers: dict[int, Transfer] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"gateway-mover-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, transfer: Transfer) -> None:
        """From now on the buffers and the socket are the movers'. Raises OSError."""
        self._transfers[transfer.fd] = transfer
        # At once, perhaps, on a thread: so it is in the dict already.
        self._epoll.register(transfer.fd, transfer.events)

    def cancel(self, transfer: Transfer) -> None:
        """End it as it is, unless it has ended; waits for the call under way, a millisecond."""
        transfer.is_cancelled = True
        with transfer.lock:
            if not transfer.is_over:
                self._end(transfer)

    def close(self) -> None:
        """End the threads. No transfer may be under way."""
        os.eventfd_write(self._stop, 1)
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        os.close(self._stop)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll(maxevents=1):
                if fd == self._stop:
                    return
                self._serve(fd)

    def _serve(self, fd: int) -> None:
        transfer = self._transfers.get(fd)
        if transfer is None:
            return  # the event is of one that was cancelled
        error: Exception | None = None
        with transfer.lock:
            if transfer.is_over:
                return
            try:
                transfer.turn()
                if transfer.left and not transfer.is_short:
                    self._epoll.modify(fd, transfer.events)
                    return
            except Exception as problem:  # whatever it is, whoever waits for the end must be told
                error = problem
            self._end(transfer)
        transfer.ended(error)
        del error  # with its traceback it refers to this frame

    def _end(self, transfer: Transfer) -> None:
        transfer.is_over = True
        self._transfers.pop(transfer.fd, None)
        with contextlib.suppress(OSError):  # it never was
            self._epoll.unregister(transfer.fd)
        transfer.let_go()
