"""Translates between messages of the protocol and the cache: keys and metadata.

A key text is `model@world_size@worker_id@chunk_hash@dtype`, then `@layer_id` for one layer's
part of a chunk, then any number of `@tag%value`. Earlier versions of LMCache begin it with `fmt@`
and leave out the dtype. LMCache writes a hash of type bytes as hex, and an int in base 16 without
leading zeros: perhaps with an odd number of digits, or a minus.

In an ObjectKey the model name is the key text with another hash field, so nothing is lost:

    field empty   the hash is bytes, and these are the chunk hash
    field `~`     the chunk hash is the ASCII text of the field

The empty field is used if the text is lower-case hex of whole bytes, `~` otherwise: each text has
exactly one key. This strict parser rejects every model name of the engine plane, so its keys in
the same tier are told apart.

A GET returns the dtype, the format and the sizes of the PUT unchanged, whatever they are; a tier's
metadata is stricter. It takes one of three forms:

    one group                          length, shape and dtype agree, or the format is encoded
    the group, then one without shape  the length differs from what shape and dtype need
    one without shape, then the group  the request gave no dtype; the group's uint8 stands for it

A chunk of any other form was not stored by this protocol and has no reply.
"""

from __future__ import annotations

import functools
import math
import re

from lmcache_redis.dtypes import ENCODED_FORMATS, itemsize
from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey, share_rank
from lmcache_redis.lm_wire import (
    MAX_KEY_LENGTH,
    ClientMetaMessage,
    ServerMetaMessage,
    ServerReturnCode,
)
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata

_TEXT_HASH = "~"
_HASH_AT = 3  # without a format
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_HASH = re.compile(r"-?[0-9a-f]+", re.ASCII)
_WHOLE_BYTES = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)
_DTYPE = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)

_NO_DTYPE = "uint8"
_NOT_GIVEN: tuple[int, ...] = ()

FAILED, SUCCEEDED = (
    ServerMetaMessage(code, 0, MemoryFormat.KV_2LTD, "float16", (0,) * 4).serialize()
    for code in (ServerReturnCode.FAIL, ServerReturnCode.SUCCESS)
)


def object_key_of(text: str) -> ObjectKey:
    """The key of a key text. Raises FormatError if the text is malformed."""
    fields = _fields_of(text)
    at = _hash_at(fields)
    size, worker, chunk_hash = int(fields[at - 2]), int(fields[at - 1]), fields[at]
    is_bytes = _WHOLE_BYTES.fullmatch(chunk_hash) is not None
    fields[at] = "" if is_bytes else _TEXT_HASH
    return ObjectKey(
        bytes.fromhex(chunk_hash) if is_bytes else chunk_hash.encode("ascii"),
        "@".join(fields),
        share_rank(size, worker),
    )


def key_text_of(key: ObjectKey) -> str:
    """The inverse of `object_key_of`. Raises FormatError for any other key."""
    fields = key.model_name.split("@")
    at = _hash_at(fields)
    if len(fields) < 5 or fields[at] not in ("", _TEXT_HASH):
        raise FormatError(f"the key of a chunk that no key text names: {key!r:.200}")
    try:
        fields[at] = key.chunk_hash.decode("ascii") if fields[at] else key.chunk_hash.hex()
    except UnicodeDecodeError:
        raise FormatError(f"a chunk hash that is not ASCII: {key!r:.200}") from None
    text = "@".join(fields)
    if object_key_of(text) != key:
        raise FormatError(f"the key of a chunk that no key text names: {key!r:.200}")
    return text


def metadata_of(message: ClientMetaMessage) -> RemoteMetadata:
    """The metadata of the payload that follows a PUT."""
    shape, name = message.shape or (0,), message.dtype_name
    if name is None:
        shapes, names = [_NOT_GIVEN, shape], [_NO_DTYPE, _NO_DTYPE]
    elif message.fmt in ENCODED_FORMATS or math.prod(shape) * itemsize(name) == message.length:
        shapes, names = [shape], [name]
    else:
        shapes, names = [shape, _NOT_GIVEN], [name, name]
    return RemoteMetadata(message.length, shapes, names, message.fmt)


@functools.lru_cache(maxsize=1024)
def reply_of(metadata: RemoteMetadata) -> bytes:
    """The header of a reply. Raises FormatError for a chunk that no request stored."""
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
    """The header of the reply to a LIST."""
    return ServerMetaMessage(
        ServerReturnCode.SUCCESS, length, MemoryFormat.BINARY, _NO_DTYPE, (length, 0, 0, 0)
    ).serialize()


def _hash_at(fields: list[str]) -> int:
    """The position of the hash. After the model comes a number, after a format the model."""
    has_format = len(fields) > 1 and not _NUMBER.fullmatch(fields[1])
    return _HASH_AT + has_format


def _fields_of(text: str) -> list[str]:
    """The fields of a key text. Raises FormatError if it is malformed."""
    if not text.isprintable() or text != text.strip():
        raise FormatError(f"a key text is printable, without spaces around it: {text!r:.200}")
    if len(text.encode("utf-8")) > MAX_KEY_LENGTH:
        raise FormatError(f"a key text of more than {MAX_KEY_LENGTH} bytes")
    fields = text.split("@")
    if len(fields) < 5 or not fields[0] or not fields[1]:
        raise FormatError(
            f"a key text is model@world_size@worker_id@hash@dtype..., not {text!r:.200}"
        )
    at = _hash_at(fields)
    world_size, worker_id, chunk_hash, *rest = fields[at - 2 :]
    if not _HASH.fullmatch(chunk_hash):
        raise FormatError(f"a hash is lower-case hex, not {chunk_hash!r:.200}")
    if at == _HASH_AT or (rest and _DTYPE.fullmatch(rest[0])):
        dtype = rest.pop(0)
        if not _DTYPE.fullmatch(dtype):
            raise FormatError(f"not the name of a dtype: {dtype!r:.200}")
    has_layer = bool(rest) and "%" not in rest[0]
    for number in (world_size, worker_id, *rest[:has_layer]):
        if not _NUMBER.fullmatch(number):
            raise FormatError(f"not a plain number: {number!r:.200}")
    for tag in rest[has_layer:]:
        if tag.find("%") < 1:
            raise FormatError(f"a tag is name%value, not {tag!r:.200}")
    return fields
