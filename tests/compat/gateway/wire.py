# SPDX-License-Identifier: Apache-2.0
"""A client of the `lm://` protocol, written from its wire facts and sharing nothing with us."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from types import TracebackType

PUT, GET, EXIST, LIST, HEALTH = 1, 2, 3, 4, 5
SUCCESS, FAIL = 200, 400
HALF, BFLOAT16, UINT8 = 2, 3, 6
KV_2LTD, BINARY = 1, 4
TIMEOUT_S = 60.0
KEY = "org/model@4@3@00ff5577aa@bfloat16"
FAILED = struct.pack("iiiiiiiii", FAIL, 0, 1, HALF, 0, 0, 0, 0, 0)
SUCCEEDED = struct.pack("iiiiiiiii", SUCCESS, 0, 1, HALF, 0, 0, 0, 0, 0)


def header(
    command: int,
    key: str | bytes = KEY,
    length: int = 0,
    fmt: int = KV_2LTD,
    dtype: int = HALF,
    sizes: Sequence[int] = (0, 0, 0, 0),
    location: int = 0,
) -> bytes:
    text = key if isinstance(key, bytes) else key.encode()
    return struct.pack(
        "iiiiiiiii150s", command, length, fmt, dtype, location, *sizes, text.ljust(150)
    )


def key(number: int) -> str:
    return f"m@1@0@{number:04x}@half"


def put(key: str, payload: bytes, **more: int) -> bytes:
    """A PUT of bytes as one row of uint8."""
    return header(PUT, key, len(payload), KV_2LTD, UINT8, (len(payload), 0, 0, 0)) + payload


class Client:
    """A blocking client. Nothing it receives is more than it asked for.

    source: the address that it connects from.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        source: str = "",
    ) -> None:
        plain = socket.create_connection((host, port), TIMEOUT_S, (source, 0) if source else None)
        try:
            self.socket = tls.wrap_socket(plain, server_hostname="localhost") if tls else plain
        except BaseException:
            plain.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self.socket.recv(min(nbytes - len(data), 1 << 20))
            if not part:
                raise EOFError(f"closed after {len(data)} of {nbytes} bytes")
            data += part
        return data

    def reply(self) -> tuple[int, int, int, int, tuple[int, ...], int]:
        """code, length, format, dtype, sizes, location; in one receive, as LMCache reads it."""
        data = self.socket.recv(36)
        if not data:
            raise EOFError("closed")
        code, length, fmt, dtype, *sizes, location = struct.unpack("iiiiiiiii", data)
        return code, length, fmt, dtype, tuple(sizes), location

    def put(self, key: str, payload: bytes) -> None:
        self.send(put(key, payload))

    def get(self, key: str) -> bytes | None:
        self.send(header(GET, key))
        code, length, *_ = self.reply()
        return self.receive(length) if code == SUCCESS else None

    def exists(self, key: str) -> bool:
        self.send(header(EXIST, key))
        return self.reply()[0] == SUCCESS

    def list(self) -> set[str]:
        self.send(header(LIST, ""))
        code, length, *_ = self.reply()
        assert code == SUCCESS
        return set(self.receive(length).decode().split("\n")) - {""}

    def healthy(self) -> bool:
        self.send(header(HEALTH, ""))
        return self.reply()[0] == SUCCESS

    def ended(self) -> bool:
        """Whether the server closes; what it still sends is read and dropped."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except (ConnectionError, ssl.SSLError):
            return True
        except TimeoutError:
            return False
        return True
