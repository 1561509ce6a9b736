"""The messages of LMCache's TCP protocol (`lm://`) as bytes. Free of torch.

All integers have 32 bits, signed, in the byte order of the machine; client and server share it.

    request, 186 bytes: command | length | format | dtype | location | 4 sizes | key, 150 bytes
    reply, 36 bytes:    code | length | format | dtype | 4 sizes | location

The key is UTF-8 text followed by spaces. A shape of fewer than four dimensions is followed by
zeros; decoding removes them, down to one dimension, unless the format is BINARY or
BINARY_BUFFER, whose shape is `length, 0, 0, 0`. A payload of `length` bytes follows a PUT and
the successful reply to a GET. Anything else raises FormatError.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from lmcache_redis.chunks.metadata import ENCODED_FORMATS, NAME_OF_CODE, MemoryFormat
from lmcache_redis.errors import FormatError, check_int, checked_shape

MAX_KEY_LENGTH = 150
MAX_WIRE_LENGTH = (1 << 31) - 1
WIRE_DIMS = 4

_Enum = TypeVar("_Enum", bound=enum.Enum)

_REQUEST = struct.Struct(f"=9i{MAX_KEY_LENGTH}s")
_REPLY = struct.Struct("=9i")
_COMMAND_AND_LENGTH = struct.Struct("=2i")


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
_NAME_OF_CODE: dict[int, str | None] = {
    0: None,
    **{code: name for code, name in NAME_OF_CODE.items() if code < 64},
}
_CODE_OF_NAME = {name: code for code, name in _NAME_OF_CODE.items()}
MEMORY_LOCATION = "LocalCPUBackend"
LOCATION_TO_INT: dict[str | None, int] = {None: 0, MEMORY_LOCATION: 1, "LocalDiskBackend": 2}
INT_TO_LOCATION: dict[int, str | None] = {code: name for name, code in LOCATION_TO_INT.items()}


@dataclass(frozen=True, slots=True)
class ClientMetaMessage:
    """A request. key: text, empty if the request names no chunk. dtype_name: None for no dtype."""

    command: ClientCommand
    key: str
    length: int
    fmt: MemoryFormat
    dtype_name: str | None
    shape: tuple[int, ...]
    location: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", _member(ClientCommand, self.command, "command"))
        self.serialize()

    def serialize(self) -> bytes:
        described, sizes, location = _numbers(self)
        key = _key_bytes(self.key).ljust(MAX_KEY_LENGTH)
        return _REQUEST.pack(self.command, *described, location, *sizes, key)

    @staticmethod
    def deserialize(data: bytes | bytearray | memoryview) -> ClientMetaMessage:
        command, length, fmt, dtype, location, *sizes, key = _unpack(_REQUEST, data)
        try:
            text = key.rstrip(b" ").decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"a key that is not UTF-8: {error}") from None
        return ClientMetaMessage(
            command, text, *_payload_fields(length, fmt, dtype, sizes, location)
        )

    @staticmethod
    def packlength() -> int:
        return _REQUEST.size

    @staticmethod
    def command_and_length(data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """The command and the payload's length, not validated: the rest may be invalid."""
        command, length = _COMMAND_AND_LENGTH.unpack_from(data)
        return command, length


@dataclass(frozen=True, slots=True)
class ServerMetaMessage:
    """A reply; dtype_name is as in `ClientMetaMessage`."""

    code: ServerReturnCode
    length: int
    fmt: MemoryFormat
    dtype_name: str | None
    shape: tuple[int, ...]
    location: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _member(ServerReturnCode, self.code, "return code"))
        self.serialize()

    def serialize(self) -> bytes:
        described, sizes, location = _numbers(self)
        return _REPLY.pack(self.code, *described, *sizes, location)

    @staticmethod
    def deserialize(data: bytes | bytearray | memoryview) -> ServerMetaMessage:
        code, length, fmt, dtype, *sizes, location = _unpack(_REPLY, data)
        return ServerMetaMessage(code, *_payload_fields(length, fmt, dtype, sizes, location))

    @staticmethod
    def packlength() -> int:
        return _REPLY.size


def _numbers(
    message: ClientMetaMessage | ServerMetaMessage,
) -> tuple[tuple[int, int, int], tuple[int, ...], int]:
    """Length, format and dtype; four sizes; location. Raises FormatError for what has no code."""
    check_int("a length", message.length, 0, MAX_WIRE_LENGTH)
    sizes = checked_shape(message.shape, MAX_WIRE_LENGTH)
    if len(sizes) > WIRE_DIMS:
        raise FormatError(f"a shape of {len(sizes)} dimensions; a message has {WIRE_DIMS}")
    if not isinstance(message.fmt, MemoryFormat):
        raise FormatError(f"a memory format is a MemoryFormat, not {message.fmt!r:.80}")
    name, location = message.dtype_name, message.location
    if not isinstance(name, (str, NoneType)) or name not in _CODE_OF_NAME:
        raise FormatError(f"dtype {name!r:.80} has no code in LMCache's protocol")
    if not isinstance(location, (str, NoneType)) or location not in LOCATION_TO_INT:
        raise FormatError(f"unknown location {location!r:.80}")
    described = message.length, message.fmt.value, _CODE_OF_NAME[name]
    return described, sizes + (0,) * (WIRE_DIMS - len(sizes)), LOCATION_TO_INT[location]


def _unpack(layout: struct.Struct, data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    if memoryview(data).nbytes != layout.size:
        raise FormatError(f"a message has {layout.size} bytes, not {memoryview(data).nbytes}")
    return layout.unpack(data)


def _payload_fields(
    length: int, fmt: int, dtype: int, sizes: Sequence[int], location: int
) -> tuple[int, MemoryFormat, str | None, tuple[int, ...], str | None]:
    if dtype not in _NAME_OF_CODE:
        raise FormatError(f"unknown dtype code {dtype}")
    if location not in INT_TO_LOCATION:
        raise FormatError(f"unknown location code {location}")
    known = _member(MemoryFormat, fmt, "memory format")
    shape = tuple(sizes)
    while known not in ENCODED_FORMATS and len(shape) > 1 and not shape[-1]:
        shape = shape[:-1]
    return length, known, _NAME_OF_CODE[dtype], shape, INT_TO_LOCATION[location]


def _key_bytes(text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError("a key that has no UTF-8") from None
    if len(data) > MAX_KEY_LENGTH:
        raise FormatError(f"a key of {len(data)} bytes; a message holds {MAX_KEY_LENGTH}")
    if data.endswith(b" "):
        raise FormatError("a key that ends in a space, which would be lost in the padding")
    return data


def _member(kind: type[_Enum], value: object, what: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise FormatError(f"unknown {what} {value!r:.80}") from None
