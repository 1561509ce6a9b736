"""Transfers between sockets and buffers, and the threads that move the large ones.

A transfer moves in turns: as many bytes as the socket takes or gives at once, up to a budget. The
loop runs the turns of small transfers. Large ones would block it while the kernel copies (or TLS
encrypts), so a few threads here run theirs. The threads share one epoll: a transfer is armed for
one event, and the thread that gets the event runs a turn and arms it again. A slow client costs an
entry in the epoll and holds no thread; several fast ones alternate.

One thread at a time owns a transfer, without a lock: it is armed only between turns. To end one
early, shut the socket down: the next turn raises.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial

TURN_BYTES = 2 << 20
# Most bytes of one system call. It keeps the socket locked, and the peer's acknowledgements wait:
# 32 MiB in one call are a quarter slower.
_PIECE_BYTES = 1 << 20
_TLS_PIECE_BYTES = 64 << 10  # sent as a whole: `left` shows progress in these steps
_MAX_BUFFERS = 512  # of one system call; the kernel's limit is 1,024

WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Ended = Callable[[], object]
More = Callable[[int], Sequence[memoryview]]


class Channel:
    """The calls that move bytes over a non-blocking socket, with or without TLS.

    Both take buffers in order, move what they can, and return the number of bytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.fd = sock.fileno()
        self.receive: Callable[[list[memoryview]], int] = partial(os.readv, self.fd)
        self.send: Callable[[list[memoryview]], int] = partial(os.writev, self.fd)
        self.decrypted_bytes: Callable[[], int] = (
            int  # decrypted, not yet received: epoll is silent
        )
        if isinstance(sock, ssl.SSLSocket):
            self.receive = lambda views: sock.recv_into(views[0])
            self.send = lambda views: sock.send(views[0][:_TLS_PIECE_BYTES])
            self.decrypted_bytes = sock.pending


class Transfer:
    """Bytes of one message in one direction. One thread at a time.

    left: bytes still to move; any thread may read it. more: called with `left` when the buffers are
    full, for further ones in order; if it returns none, the transfer ends.
    events: what the socket must be ready for before the next turn. error: of a thread's turn.
    """

    def __init__(
        self,
        channel: Channel,
        buffers: Sequence[memoryview],
        *,
        sending: bool,
        left: int | None = None,
        more: More | None = None,
    ) -> None:
        self.fd = channel.fd
        self.left = sum(map(len, buffers)) if left is None else left
        self.error: Exception | None = None
        self.events = self._own_events = select.EPOLLOUT if sending else select.EPOLLIN
        self._more = more
        self._call = channel.send if sending else channel.receive
        self._decrypted_bytes = int if sending else channel.decrypted_bytes
        self._buffers = [each for each in reversed(buffers) if each]  # the last one is next

    def turn(self, budget: int) -> bool:
        """Moves what can be moved now; returns whether the transfer has ended. Raises OSError.

        budget: most bytes; bytes that TLS has decrypted are received beyond it.
        """
        self.events = self._own_events
        until = self.left - budget
        while self.left and (self.left > until or self._decrypted_bytes()):
            if not self._buffers and not self._has_more():
                return True
            try:
                moved = self._call(self._piece())
            except WAITS as wait:
                self.events = events_of(wait, self._own_events)
                return False
            if not moved:
                raise ConnectionError("the client closed its side")
            self._advance(moved)
        return not self.left

    def _has_more(self) -> bool:
        self._buffers = [] if self._more is None else [*reversed(self._more(self.left))]
        return bool(self._buffers)

    def _piece(self) -> list[memoryview]:
        if self.left <= _PIECE_BYTES:
            return self._buffers[: -_MAX_BUFFERS - 1 : -1]
        piece: list[memoryview] = []
        room = _PIECE_BYTES
        for buffer in self._buffers[: -_MAX_BUFFERS - 1 : -1]:
            piece.append(buffer[:room])
            room -= len(piece[-1])
            if not room:
                break
        return piece

    def _advance(self, nbytes: int) -> None:
        self.left -= nbytes
        if not self.left:
            self._buffers.clear()
            return
        while self._buffers and nbytes >= len(self._buffers[-1]):
            nbytes -= len(self._buffers.pop())
        if nbytes:
            self._buffers[-1] = self._buffers[-1][nbytes:]


class Movers:
    """Threads that move large transfers. Thread-safe. They have the sockets to themselves."""

    def __init__(self, threads: int) -> None:
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._transfers: dict[int, tuple[Transfer, Ended]] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"gateway-mover-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, transfer: Transfer, ended: Ended) -> None:
        """Moves it until it ends or fails. Raises OSError if the epoll is full.

        ended: called once, on one of the threads; it must not block. Until then buffers and socket
        belong to the threads.
        """
        self._transfers[transfer.fd] = transfer, ended
        # A thread may have it at once, so it is in the dict already.
        try:
            self._epoll.register(transfer.fd, transfer.events | select.EPOLLONESHOT)
        except OSError:
            del self._transfers[transfer.fd]
            raise

    def close(self) -> None:
        """Ends the threads. No transfer may be in flight."""
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
        transfer, ended = self._transfers[fd]
        try:
            if not transfer.turn(TURN_BYTES):
                self._epoll.modify(fd, transfer.events | select.EPOLLONESHOT)
                return
        except Exception as error:  # also of `more`: the owner must be told
            transfer.error = error
        self._epoll.unregister(fd)
        del self._transfers[fd], transfer
        ended()


def events_of(wait: OSError, own: int) -> int:
    """What a socket that would block must be ready for. own: the answer without TLS."""
    if isinstance(wait, ssl.SSLWantReadError):
        return select.EPOLLIN
    return select.EPOLLOUT if isinstance(wait, ssl.SSLWantWriteError) else own
