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

import enum
import struct
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from lmcache_redis.chunks.metadata import ENCODED_FORMATS, NAME_OF_CODE, MemoryFormat
from lmcache_redis.errors import FormatError, check_int, checked_shape

MAX_KEY_LENGTH = 150
MAX_WIRE_LENGTH = (1 << 31) - 1
_WIRE_DIMS = 4

_Bytes = bytes | bytearray | memoryview
_Enum = TypeVar("_Enum", bound=enum.Enum)

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


def packed_request(command: ClientCommand, key: str, payload: PayloadFields) -> bytes:
    described, sizes, location = _numbers(payload)
    command = _member(ClientCommand, command, "command")
    return _REQUEST.pack(command, *described, location, *sizes, _key_bytes(key))


def unpacked_request(data: _Bytes) -> tuple[ClientCommand, str, PayloadFields]:
    """The inverse of `packed_request`."""
    command, length, fmt, dtype, location, *sizes, key = _unpack(_REQUEST, data)
    payload = _payload(length, fmt, dtype, sizes, location)
    try:
        text = key.rstrip(b" ").decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"a key that is not UTF-8: {error}") from None
    return _member(ClientCommand, command, "command"), text, payload


def command_and_length(request: _Bytes) -> tuple[int, int]:
    """The command and the payload's length, not validated: the rest may be invalid."""
    command, length = _COMMAND_AND_LENGTH.unpack_from(request)
    return command, length


def packed_reply(code: ServerReturnCode, payload: PayloadFields) -> bytes:
    described, sizes, location = _numbers(payload)
    return _REPLY.pack(_member(ServerReturnCode, code, "return code"), *described, *sizes, location)


def unpacked_reply(data: _Bytes) -> tuple[ServerReturnCode, PayloadFields]:
    """The inverse of `packed_reply`."""
    code, length, fmt, dtype, *sizes, location = _unpack(_REPLY, data)
    payload = _payload(length, fmt, dtype, sizes, location)
    return _member(ServerReturnCode, code, "return code"), payload


def _numbers(payload: PayloadFields) -> tuple[tuple[int, int, int], tuple[int, ...], int]:
    """Length, format and dtype; four sizes; location. Raises FormatError for what has no code."""
    length, fmt, name, shape, location = payload
    check_int("a length", length, 0, MAX_WIRE_LENGTH)
    sizes = checked_shape(shape, MAX_WIRE_LENGTH)
    if len(sizes) > _WIRE_DIMS:
        raise FormatError(f"a shape of {len(sizes)} dimensions; a message has {_WIRE_DIMS}")
    if not isinstance(fmt, MemoryFormat):
        raise FormatError(f"a memory format is a MemoryFormat, not {fmt!r:.80}")
    if not isinstance(name, (str, NoneType)) or name not in _CODE_OF_NAME:
        raise FormatError(f"dtype {name!r:.80} has no code in LMCache's protocol")
    if not isinstance(location, (str, NoneType)) or location not in LOCATION_TO_INT:
        raise FormatError(f"unknown location {location!r:.80}")
    described = length, fmt.value, _CODE_OF_NAME[name]
    return described, sizes + (0,) * (_WIRE_DIMS - len(sizes)), LOCATION_TO_INT[location]


def _unpack(layout: struct.Struct, data: _Bytes) -> tuple[Any, ...]:
    if memoryview(data).nbytes != layout.size:
        raise FormatError(f"a message has {layout.size} bytes, not {memoryview(data).nbytes}")
    return layout.unpack(data)


def _payload(
    length: int, fmt: int, dtype: int, sizes: Sequence[int], location: int
) -> PayloadFields:
    if dtype not in NAME_OF_WIRE_CODE:
        raise FormatError(f"unknown dtype code {dtype}")
    if location not in INT_TO_LOCATION:
        raise FormatError(f"unknown location code {location}")
    check_int("a length", length, 0, MAX_WIRE_LENGTH)
    known = _member(MemoryFormat, fmt, "memory format")
    shape = checked_shape(sizes, MAX_WIRE_LENGTH)
    while known not in ENCODED_FORMATS and len(shape) > 1 and not shape[-1]:
        shape = shape[:-1]
    return PayloadFields(length, known, NAME_OF_WIRE_CODE[dtype], shape, INT_TO_LOCATION[location])


def _key_bytes(text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError("a key that has no UTF-8") from None
    if len(data) > MAX_KEY_LENGTH:
        raise FormatError(f"a key of {len(data)} bytes; a message holds {MAX_KEY_LENGTH}")
    if data.endswith(b" "):
        raise FormatError("a key that ends in a space, which would be lost in the padding")
    return data.ljust(MAX_KEY_LENGTH)


def _member(kind: type[_Enum], value: object, what: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise FormatError(f"unknown {what} {value!r:.80}") from None
