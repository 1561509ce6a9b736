# SPDX-License-Identifier: Apache-2.0
"""A minimal client of the `lm://` protocol, and many of them at once.

`python -m benchmarks.lm_client PORT CLIENTS GETS BYTES KEYS`: each client is a thread with a
connection of its own and GETs KEYS chunks of BYTES in turn, GETS times. Prints one line of JSON:
seconds in total, and of every GET.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence

from lmcache_redis.chunks.metadata import MemoryFormat
from lmcache_redis.compat.lm_wire import (
    REPLY_BYTES,
    ClientCommand,
    PayloadFields,
    ServerReturnCode,
    packed_request,
    unpacked_reply,
)
from lmcache_redis.errors import LMCacheRedisError

LOAD_NAME = "many"
_TIMEOUT_S = 60.0


class LmClientFailed(LMCacheRedisError):
    """The server closed the connection, or sent an unexpected answer."""


def key_text(name: str, number: int) -> str:
    """The key of a chunk, as LMCache writes them."""
    return f"bench/{name}@1@0@{number:064x}@bfloat16"


class LmClient:
    """One connection. A context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._header = memoryview(bytearray(REPLY_BYTES))

    def __enter__(self) -> LmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def put(self, key: str, payload: memoryview) -> None:
        """Sends a chunk. There is no reply; the connection serves a later `exists` after it."""
        self._socket.sendall(_request(ClientCommand.PUT, key, payload.nbytes))
        self._socket.sendall(payload)

    def exists(self, key: str) -> bool:
        self._socket.sendall(_request(ClientCommand.EXIST, key, 0))
        return self._reply() is not None

    def get_into(self, key: str, payload: memoryview) -> None:
        """Loads a chunk of exactly this length. Raises LmClientFailed for a miss."""
        self._socket.sendall(_request(ClientCommand.GET, key, 0))
        length = self._reply()
        if length != payload.nbytes:
            raise LmClientFailed(f"a chunk of {payload.nbytes} bytes was expected, not {length}")
        self._receive(payload)

    def _reply(self) -> int | None:
        """The length that a reply announces; None for a FAIL."""
        self._receive(self._header)
        code, reply = unpacked_reply(self._header)
        return reply.length if code is ServerReturnCode.SUCCESS else None

    def _receive(self, view: memoryview) -> None:
        while view.nbytes:
            received = self._socket.recv_into(view)
            if not received:
                raise LmClientFailed("the server closed the connection")
            view = view[received:]


def _request(command: ClientCommand, key: str, nbytes: int) -> bytes:
    elements = max(1, nbytes // 2)
    shape = (2, 1, elements // 2, 1)
    payload = PayloadFields(nbytes, MemoryFormat.KV_2LTD, "bfloat16", shape)
    return packed_request(command, key, payload)


def main(arguments: Sequence[str]) -> int:
    port, clients, gets, nbytes, keys = map(int, arguments)
    seconds: list[list[float]] = [[] for _ in range(clients)]
    begin = threading.Barrier(clients + 1, timeout=_TIMEOUT_S)

    def work(number: int) -> None:
        buffer = memoryview(bytearray(nbytes))
        with LmClient(port) as client:
            client.exists(key_text(LOAD_NAME, 0))
            begin.wait()
            for turn in range(gets):
                key = key_text(LOAD_NAME, (number + turn) % keys)
                started_s = time.perf_counter()
                client.get_into(key, buffer)
                seconds[number].append(time.perf_counter() - started_s)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    started_s = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - started_s
    gets_s = [each for of_one in seconds for each in of_one]
    if len(gets_s) < clients * gets:
        return 1
    print(json.dumps({"elapsed_s": elapsed_s, "gets_s": gets_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
