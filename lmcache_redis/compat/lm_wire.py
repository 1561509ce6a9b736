# SPDX-License-Identifier: Apache-2.0
"""The messages of LMCache's TCP protocol (`lm://`) as bytes. Free of torch.

All integers have 32 bits, signed, in the byte order of the machine; client and server share it.

    request, 186 bytes: command | length | format | dtype | location | 4 sizes | key, 150 bytes
    reply, 36 bytes:    code | length | format | dtype | 4 sizes | location

The key is UTF-8 text followed by spaces; none if the request names no chunk. A shape of fewer than
four dimensions is followed by zeros; decoding removes them, down to one dimension, unless the
format is BINARY or BINARY_BUFFER, whose shape is `length, 0, 0, 0`. A payload of `length` bytes
follows a PUT and the successful reply to a GET. Anything else raises FormatError.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_redis.chunks.metadata import ENCODED_FORMATS, NAME_OF_CODE, MemoryFormat
from lmcache_redis.errors import FormatError, check_int, checked_shape

MAX_KEY_LENGTH = 150
MAX_WIRE_LENGTH = (1 << 31) - 1
_WIRE_DIMS = 4

_Bytes = bytes | bytearray | memoryview

_REQUEST = struct.Struct(f"=9i{MAX_KEY_LENGTH}s")
_REPLY = struct.Struct("=9i")
_COMMAND_AND_LENGTH = struct.Struct("=2i")
REQUEST_BYTES, REPLY_BYTES = _REQUEST.size, _REPLY.size


class ClientCommand(enum.IntEnum):
    """The operation that a request asks for."""

    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5


class ServerReturnCode(enum.IntEnum):
    """The result of a request, in numbers borrowed from HTTP."""

    SUCCESS = 200
    FAIL = 400


# LMCache's codes are those below 64; its protocol adds 0 for no dtype.
NAME_OF_WIRE_CODE: dict[int, str | None] = {
    0: None,
    **{code: name for code, name in NAME_OF_CODE.items() if code < 64},
}
_CODE_OF_NAME = {name: code for code, name in NAME_OF_WIRE_CODE.items()}
LOCATION_TO_INT: dict[str | None, int] = {None: 0, "LocalCPUBackend": 1, "LocalDiskBackend": 2}
INT_TO_LOCATION: dict[int, str | None] = {code: name for name, code in LOCATION_TO_INT.items()}


class PayloadFields(NamedTuple):
    """What a message says of a payload. dtype_name: None for no dtype."""

    length: int
    fmt: MemoryFormat
    dtype_name: str | None
    shape: tuple[int, ...]
    location: str | None = None


@contextlib.contextmanager
def _format_errors(what: str) -> Iterator[None]:
    """Raises FormatError for what has no encoding, or no meaning."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise FormatError(f"a malformed {what}: {error}") from None


def packed_request(command: ClientCommand, key: str, payload: PayloadFields) -> bytes:
    with _format_errors("request"):
        *described, location, sizes = _numbers(payload)
        return _REQUEST.pack(ClientCommand(command), *described, location, *sizes, _key_bytes(key))


def unpacked_request(data: _Bytes) -> tuple[ClientCommand, str, PayloadFields]:
    """The inverse of `packed_request`."""
    with _format_errors("request"):
        command, length, fmt, dtype, location, *sizes, key = _REQUEST.unpack(data)
        payload = _payload(length, fmt, dtype, sizes, location)
        return ClientCommand(command), key.rstrip(b" ").decode("utf-8"), payload


def command_and_length(request: _Bytes) -> tuple[int, int]:
    """The command and the payload's length, not validated: the rest may be invalid."""
    command, length = _COMMAND_AND_LENGTH.unpack_from(request)
    return command, length


def packed_reply(code: ServerReturnCode, payload: PayloadFields) -> bytes:
    with _format_errors("reply"):
        *described, location, sizes = _numbers(payload)
        return _REPLY.pack(ServerReturnCode(code), *described, *sizes, location)


def unpacked_reply(data: _Bytes) -> tuple[ServerReturnCode, PayloadFields]:
    """The inverse of `packed_reply`."""
    with _format_errors("reply"):
        code, length, fmt, dtype, *sizes, location = _REPLY.unpack(data)
        return ServerReturnCode(code), _payload(length, fmt, dtype, sizes, location)


def _numbers(payload: PayloadFields) -> tuple[int, int, int, int, tuple[int, ...]]:
    """Length, format, dtype, location; four sizes."""
    length, fmt, name, shape, location = payload
    check_int("a length", length, 0, MAX_WIRE_LENGTH)
    sizes = checked_shape(shape, MAX_WIRE_LENGTH)
    if len(sizes) > _WIRE_DIMS:
        raise FormatError(f"a shape has {len(sizes)} dimensions, a message {_WIRE_DIMS}")
    sizes += (0,) * (_WIRE_DIMS - len(sizes))
    return length, fmt.value, _CODE_OF_NAME[name], LOCATION_TO_INT[location], sizes


def _payload(
    length: int, fmt: int, dtype: int, sizes: Sequence[int], location: int
) -> PayloadFields:
    check_int("a length", length, 0, MAX_WIRE_LENGTH)
    known, shape = MemoryFormat(fmt), checked_shape(sizes, MAX_WIRE_LENGTH)
    while known not in ENCODED_FORMATS and len(shape) > 1 and not shape[-1]:
        shape = shape[:-1]
    return PayloadFields(length, known, NAME_OF_WIRE_CODE[dtype], shape, INT_TO_LOCATION[location])


def _key_bytes(text: str) -> bytes:
    data = text.encode("utf-8")
    if len(data) > MAX_KEY_LENGTH:
        raise FormatError(f"a key has {len(data)} bytes, a message holds {MAX_KEY_LENGTH}")
    if data.endswith(b" "):
        raise FormatError("a key ends in a space, which would be lost in the padding")
    return data.ljust(MAX_KEY_LENGTH)
