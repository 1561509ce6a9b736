"""A process that takes bytes and sends as many back: what a server costs at the least.

Protocol: a request of 9 bytes (what, how many bytes). For FRESH and AGAIN the bytes follow,
answered by one byte; for SEND so many bytes come back. FRESH puts them into new memory, as a
server has to, which DROP gives back; the others use one small buffer over and over.
The port stands on stdout; the process ends when its stdin does.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator

FRESH, AGAIN, SEND, DROP = b"F", b"A", b"S", b"D"
ACKNOWLEDGED = b"k"
REQUEST = struct.Struct("<cQ")
# Stays in a core's cache.
_BUFFER_BYTES = 256 << 10


def receive(connection: socket.socket, buffer: memoryview | bytearray) -> bool:
    """Fills the buffer; False where the other end has gone."""
    view = memoryview(buffer)
    got = 0
    while got < view.nbytes:
        # What is there, not MSG_WAITALL: the sender goes on meanwhile, which is faster here.
        count = connection.recv_into(view[got:])
        if count == 0:
            return False
        got += count
    return True


def serve(connection: socket.socket) -> None:
    """Answers requests of one connection until it is closed."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    request = bytearray(REQUEST.size)
    kept: list[memoryview] = []
    whole = True
    while receive(connection, request):
        what, total = REQUEST.unpack(request)
        if what == FRESH:
            kept.append(memoryview(mmap.mmap(-1, total)))
            whole = all(receive(connection, piece) for piece in _cut(kept[-1]))
        elif what == AGAIN:
            whole = all(receive(connection, piece) for piece in _pieces(buffer, total))
        elif what == DROP:
            kept.clear()
        else:
            for piece in _pieces(buffer, total):
                connection.sendall(piece)
            continue
        if not whole:
            return
        connection.sendall(ACKNOWLEDGED)


def _cut(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, memory.nbytes, _BUFFER_BYTES):
        yield memory[at : at + _BUFFER_BYTES]


def _pieces(buffer: memoryview, total: int) -> Iterator[memoryview]:
    """The buffer, again and again, the last time only as far as is needed."""
    for at in range(0, total, buffer.nbytes):
        yield buffer[: total - at]


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
