# SPDX-License-Identifier: Apache-2.0
"""lmcache.v1.protocol, with the keys of lmcache.utils and MemoryFormat of memory_management.

The messages of the `lm://` protocol have LMCache's bytes (`compat.lm_wire`) and hold key
objects, torch.Size and torch.dtype. They are checked when they are made and when they are encoded:
what has no encoding raises FormatError, which is a ValueError, where LMCache asserts.

The encoding of `RemoteMetadata` is this package's (docs/reference/value-format.md): it has sizes of
64 bits and says its number of groups, so `init_remote_metadata_info` is needed only for
`get_remote_metadata_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lmcache_redis.chunks.metadata import (
    MAX_GROUPS,
    MemoryFormat,
    MetadataFields,
    dtype_name,
    torch_dtype,
)
from lmcache_redis.compat import lm_wire
from lmcache_redis.compat.cache_engine_key import (
    CacheEngineKey,
    LayerCacheEngineKey,
    parse_cache_key,
)
from lmcache_redis.compat.lm_wire import (
    INT_TO_LOCATION,
    LOCATION_TO_INT,
    MAX_KEY_LENGTH,
    ClientCommand,
    PayloadFields,
    ServerReturnCode,
)
from lmcache_redis.errors import FormatError, check_int

__all__ = [
    "DTYPE_TO_INT",
    "INT_TO_DTYPE",
    "INT_TO_LOCATION",
    "LOCATION_TO_INT",
    "MAX_KEY_LENGTH",
    "CacheEngineKey",
    "ClientCommand",
    "ClientMetaMessage",
    "LayerCacheEngineKey",
    "MemoryFormat",
    "RemoteMetadata",
    "ServerMetaMessage",
    "ServerReturnCode",
    "get_remote_metadata_bytes",
    "init_remote_metadata_info",
    "parse_cache_key",
]

INT_TO_DTYPE: dict[int, torch.dtype | None] = {
    code: None if name is None else torch_dtype(name)
    for code, name in lm_wire.NAME_OF_WIRE_CODE.items()
}
# Of the two codes of float16 the second is written.
DTYPE_TO_INT = {dtype: code for code, dtype in INT_TO_DTYPE.items()}

_Buffer = bytes | bytearray | memoryview


@dataclass
class RemoteMetadata:
    """Length in bytes, memory format, and the shape and dtype of each group of a chunk.

    At most 8 groups of at most 8 dimensions, and 336 bytes. As in LMCache, the length is any: some
    connectors count a header in it, and pad shapes with zeros. Raises FormatError for what cannot
    be encoded.
    """

    length: int
    shapes: list[torch.Size]
    dtypes: list[torch.dtype | None]
    fmt: MemoryFormat

    def __post_init__(self) -> None:
        fields = self._fields()
        self.shapes = [torch.Size(shape) for shape in fields.shapes]
        self.dtypes = [_torch_dtype(name) for name in fields.dtype_names]

    def serialize(self) -> bytes:
        return self._fields().encoded()

    def serialize_into(self, buffer: bytearray | memoryview) -> int:
        """Writes the encoding to the start of a buffer; returns its length in bytes.

        Bytes after it stay unchanged. Raises FormatError if the buffer is too short.
        """
        encoded, view = self.serialize(), memoryview(buffer).cast("B")
        if len(view) < len(encoded):
            raise FormatError(f"{len(view)} bytes do not hold metadata of {len(encoded)}")
        view[: len(encoded)] = encoded
        return len(encoded)

    @staticmethod
    def deserialize(s: _Buffer) -> RemoteMetadata:
        """The metadata with which bytes begin. What follows them in a buffer is not read.

        Raises FormatError for other bytes.
        """
        length, shapes, names, fmt = MetadataFields.at_start_of(s)
        dtypes = [_torch_dtype(name) for name in names]
        return RemoteMetadata(length, [torch.Size(shape) for shape in shapes], dtypes, fmt)

    def _fields(self) -> MetadataFields:
        return MetadataFields.of(self.length, self.shapes, self.dtypes, self.fmt)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else torch_dtype(name)


@dataclass
class ClientMetaMessage:
    """A request. key: a key object or its text; empty if the request names no chunk."""

    command: ClientCommand
    key: CacheEngineKey | LayerCacheEngineKey | str
    length: int
    fmt: MemoryFormat
    dtype: torch.dtype | None
    shape: torch.Size
    location: str | None = None

    def __post_init__(self) -> None:
        self.serialize()
        self.command, self.shape = ClientCommand(self.command), torch.Size(self.shape)
        if isinstance(self.key, str) and self.key:
            self.key = parse_cache_key(self.key)

    def serialize(self) -> bytes:
        key = self.key.to_string() if isinstance(self.key, CacheEngineKey) else self.key
        return lm_wire.packed_request(self.command, key, _payload(self))

    @staticmethod
    def deserialize(s: _Buffer) -> ClientMetaMessage:
        """The message that bytes encode. Also raises FormatError for a malformed key."""
        command, key, payload = lm_wire.unpacked_request(s)
        return ClientMetaMessage(command, key, *_fields(payload))

    @staticmethod
    def packlength() -> int:
        return lm_wire.REQUEST_BYTES


@dataclass
class ServerMetaMessage:
    """A reply."""

    code: ServerReturnCode
    length: int
    fmt: MemoryFormat
    dtype: torch.dtype | None
    shape: torch.Size
    location: str | None = None

    def __post_init__(self) -> None:
        self.serialize()
        self.code, self.shape = ServerReturnCode(self.code), torch.Size(self.shape)

    def serialize(self) -> bytes:
        return lm_wire.packed_reply(self.code, _payload(self))

    @staticmethod
    def deserialize(s: _Buffer) -> ServerMetaMessage:
        code, payload = lm_wire.unpacked_reply(s)
        return ServerMetaMessage(code, *_fields(payload))

    @staticmethod
    def packlength() -> int:
        return lm_wire.REPLY_BYTES


def _payload(message: ClientMetaMessage | ServerMetaMessage) -> PayloadFields:
    name = None if message.dtype is None else dtype_name(message.dtype)
    return PayloadFields(message.length, message.fmt, name, message.shape, message.location)


def _fields(payload: PayloadFields) -> tuple[Any, ...]:
    dtype = _torch_dtype(payload.dtype_name)
    return payload.length, payload.fmt, dtype, payload.shape, payload.location


_group_count: int | None = None


def init_remote_metadata_info(num_groups: int) -> None:
    """Sets the number of groups in every chunk of this process, 0 to 8, once per process."""
    global _group_count
    check_int("the number of groups", num_groups, 0, MAX_GROUPS)
    _group_count = num_groups


def get_remote_metadata_bytes() -> int:
    """Bytes of a chunk's metadata if no group has more than 4 dimensions.

    Raises RuntimeError before `init_remote_metadata_info`.
    """
    if _group_count is None:
        raise RuntimeError("init_remote_metadata_info was not called yet")
    shapes, names = ((),) * _group_count, (None,) * _group_count
    return len(MetadataFields(0, shapes, names, MemoryFormat.UNDEFINED).encoded())
