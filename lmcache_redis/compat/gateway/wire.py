# SPDX-License-Identifier: Apache-2.0
"""Translates between messages of the protocol and the cache: keys and metadata.

A key text is `model@world_size@worker_id@chunk_hash@dtype`, then `@layer_id` for one layer's
part of a chunk, then any number of `@tag%value`. Earlier versions of LMCache begin it with `fmt@`
and leave out the dtype. LMCache writes a hash of type bytes as hex, and an int in base 16 without
leading zeros; it may have an odd number of digits, or a minus.

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

from lmcache_redis.chunks.keys import MAX_HASH_BYTES, ObjectKey, share_rank
from lmcache_redis.chunks.metadata import ENCODED_FORMATS, MemoryFormat, RemoteMetadata, itemsize
from lmcache_redis.compat.cache_engine_key import BYTES_HASH, KEY_TEXT
from lmcache_redis.compat.lm_wire import (
    MAX_KEY_LENGTH,
    PayloadFields,
    ServerReturnCode,
    packed_reply,
)
from lmcache_redis.errors import FormatError

_TEXT_HASH = "~"
_HASH = re.compile(r"-?[0-9a-f]+", re.ASCII)

_NO_DTYPE = "uint8"
_NOT_GIVEN: tuple[int, ...] = ()

FAILED, SUCCEEDED = (
    packed_reply(code, PayloadFields(0, MemoryFormat.KV_2LTD, "float16", (0,) * 4))
    for code in (ServerReturnCode.FAIL, ServerReturnCode.SUCCESS)
)


def object_key_of(text: str) -> ObjectKey:
    """The key of a key text. Raises FormatError if the text is malformed."""
    if not text.isprintable() or text != text.strip():
        raise FormatError(f"a key text is printable, without spaces around it: {text!r:.200}")
    if len(text.encode("utf-8")) > MAX_KEY_LENGTH:
        raise FormatError(f"a key text has more than {MAX_KEY_LENGTH} bytes")
    match = KEY_TEXT.fullmatch(text)
    if (
        match is None
        or not _HASH.fullmatch(match["chunk_hash"])
        or not (match["dtype"] or match["fmt"])
    ):
        raise FormatError(
            "a key text is model@world_size@worker_id@hash@dtype, then maybe @layer_id and "
            f"@tag%value, with plain numbers and a hash in lower-case hex, not {text!r:.200}"
        )
    chunk_hash = match["chunk_hash"]
    is_bytes = BYTES_HASH.fullmatch(chunk_hash) is not None
    packed = bytes.fromhex(chunk_hash) if is_bytes else chunk_hash.encode("ascii")
    if len(packed) > MAX_HASH_BYTES:  # a LIST could not say the text
        raise FormatError(
            f"a hash has {len(packed)} bytes, {MAX_HASH_BYTES} at most fit a key text"
        )
    return ObjectKey(
        packed,
        _with_hash(match, "" if is_bytes else _TEXT_HASH),
        share_rank(int(match["world_size"]), int(match["worker_id"])),
    )


def key_text_of(key: ObjectKey) -> str:
    """The inverse of `object_key_of`. Raises FormatError for any other key."""
    match = KEY_TEXT.fullmatch(key.model_name)
    if match is not None and match["chunk_hash"] in ("", _TEXT_HASH):
        # A hash that is not ASCII makes a malformed key text.
        as_text = key.chunk_hash.decode("ascii", "replace")
        text = _with_hash(match, as_text if match["chunk_hash"] else key.chunk_hash.hex())
        if object_key_of(text) == key:
            return text
    raise FormatError(f"no key text names the chunk {key!r:.200}")


def _with_hash(match: re.Match[str], chunk_hash: str) -> str:
    start, end = match.span("chunk_hash")
    return match.string[:start] + chunk_hash + match.string[end:]


def metadata_of(message: PayloadFields) -> RemoteMetadata:
    """The metadata of the payload that follows a PUT."""
    shape, name = message.shape, message.dtype_name
    if name is None:
        shapes, names = [_NOT_GIVEN, shape], [_NO_DTYPE, _NO_DTYPE]
    elif message.fmt in ENCODED_FORMATS or math.prod(shape) * itemsize(name) == message.length:
        shapes, names = [shape], [name]
    else:
        shapes, names = [shape, _NOT_GIVEN], [name, name]
    return RemoteMetadata(message.length, shapes, names, message.fmt)


@functools.lru_cache(maxsize=1024)
def reply_of(metadata: RemoteMetadata) -> bytes | None:
    """The header of a reply; None for a chunk that no request stored: a miss."""
    shapes, names = metadata.shapes, metadata.dtype_names
    if len(shapes) == 2 and shapes[0] == _NOT_GIVEN:
        name, shape = None, shapes[1]
    elif len(shapes) == 1 or (len(shapes) == 2 and shapes[1] == _NOT_GIVEN):
        name, shape = names[0], shapes[0]
    else:
        return None
    try:
        payload = PayloadFields(metadata.length, metadata.fmt, name, shape)
        return packed_reply(ServerReturnCode.SUCCESS, payload)
    except FormatError:
        return None


def list_reply_of(length: int) -> bytes:
    """The header of the reply to a LIST."""
    payload = PayloadFields(length, MemoryFormat.BINARY, _NO_DTYPE, (length, 0, 0, 0))
    return packed_reply(ServerReturnCode.SUCCESS, payload)
