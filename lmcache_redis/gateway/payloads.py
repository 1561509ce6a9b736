"""What a request says about its payload, as the metadata of tiers, and the reply made of that.

The dtype, the format and the sizes of a request come back in the reply to a later GET, whatever
they are; a tier's metadata is stricter. It gets one of three forms:

    one group                         length, shape and dtype agree, or the format is encoded
    the group, then one without shape  the length is another than shape and dtype need
    one without shape, then the group  the request gave no dtype; the group's uint8 stands for it

A chunk of any other form was stored by somebody else and has no reply. The location of a request
is not kept: it says where the client had the chunk.
"""

from __future__ import annotations

import functools

from lmcache_redis.errors import FormatError
from lmcache_redis.lm_wire import ClientMetaMessage, ServerMetaMessage, ServerReturnCode
from lmcache_redis.protocol import MAX_DIMS, MemoryFormat, MemoryLayoutDesc, RemoteMetadata

_NO_DTYPE = "uint8"
_NOT_GIVEN: tuple[int, ...] = ()
_ENCODED_FORMATS = frozenset({MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER})

FAILED = ServerMetaMessage(
    ServerReturnCode.FAIL, 0, MemoryFormat.KV_2LTD, "float16", (0,) * MAX_DIMS
).serialize()
SUCCEEDED = ServerMetaMessage(
    ServerReturnCode.SUCCESS, 0, MemoryFormat.KV_2LTD, "float16", (0,) * MAX_DIMS
).serialize()


def metadata_of(message: ClientMetaMessage) -> RemoteMetadata:
    """The metadata of the payload that follows a PUT."""
    shape, name = message.shape or (0,), message.dtype_name
    if name is None:
        shapes, names = [_NOT_GIVEN, shape], [_NO_DTYPE, _NO_DTYPE]
    elif message.fmt in _ENCODED_FORMATS or (
        MemoryLayoutDesc([shape], [name]).size_bytes == message.length
    ):
        shapes, names = [shape], [name]
    else:
        shapes, names = [shape, _NOT_GIVEN], [name, name]
    return RemoteMetadata(message.length, shapes, names, message.fmt)


@functools.lru_cache(maxsize=1024)
def reply_of(metadata: RemoteMetadata) -> bytes:
    """The header before the payload. Raises FormatError for a chunk that no request stored."""
    shapes, names = metadata.shapes, metadata.dtype_names
    name: str | None = names[0] if names else None
    if len(shapes) == 1 or (len(shapes) == 2 and shapes[1] == _NOT_GIVEN):
        shape = shapes[0]
    elif len(shapes) == 2 and shapes[0] == _NOT_GIVEN:
        shape, name = shapes[1], None
    else:
        raise FormatError(f"a chunk of {len(shapes)} groups; a reply describes one")
    return ServerMetaMessage(
        ServerReturnCode.SUCCESS, metadata.length, metadata.fmt, name, shape
    ).serialize()


def list_reply_of(length: int) -> bytes:
    """The header before the text of a LIST."""
    return ServerMetaMessage(
        ServerReturnCode.SUCCESS, length, MemoryFormat.BINARY, _NO_DTYPE, (length, 0, 0, 0)
    ).serialize()
