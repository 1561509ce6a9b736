"""Keys of LMCache's storage backends, and the ObjectKeys that stand for them.

A key is any object with model_name, world_size, worker_id and chunk_hash; and with fmt, dtype and
layer_id where its release of LMCache has them. Each is part of the key: chunks of "vllm" and of
"huggingface" never meet, nor do the layers of a chunk. Its ObjectKey has

    chunk_hash   the hash as bytes
    model_name   lmcache@fmt@dtype@layer_id@hash type@model_name; a field that is not given is empty
    kv_rank      world_size and worker_id, of workers on one node

    hash type    the hash of the key
    bytes        bytes
    hex          a str of lower-case hex, two digits a byte: a SHA-256 has 32 bytes
    text         any other str, in UTF-8
    int          an int, in decimal digits

So unequal keys have unequal ObjectKeys. An ObjectKey stands for itself.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from lmcache_redis.chunks.keys import ObjectKey, share_rank
from lmcache_redis.chunks.metadata import dtype_name, torch_dtype
from lmcache_redis.compat.cache_engine_key import CacheEngineKey, LayerCacheEngineKey
from lmcache_redis.errors import FormatError, check_int

_MARK = "lmcache"
_ALWAYS = ("model_name", "world_size", "worker_id", "chunk_hash")
_OPTIONAL = ("fmt", "dtype", "layer_id")
_MOST_LAYERS = 1 << 16
_HEX = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)


# An ObjectKey, or any object with the fields of a key of LMCache.
AnyKey: TypeAlias = Any


def object_key_of(key: AnyKey) -> ObjectKey:
    """The ObjectKey of a key. Raises FormatError if the key lacks a field or has no encoding."""
    if isinstance(key, ObjectKey):
        return key
    missing = [name for name in _ALWAYS if not hasattr(key, name)]
    if missing:
        raise FormatError(
            f"a key is an ObjectKey, or has {', '.join(_ALWAYS)} and perhaps "
            f"{', '.join(_OPTIONAL)}; {type(key).__name__} has no {', '.join(missing)}"
        )
    if getattr(key, "tags", None):
        raise FormatError("a key with tags is not supported: make them part of its model_name")
    fmt, dtype, layer_id = (getattr(key, name, None) for name in _OPTIONAL)
    if fmt is not None and (not isinstance(fmt, str) or not fmt or "@" in fmt):
        raise FormatError(f"fmt is a name without @, or None, not {fmt!r:.80}")
    if layer_id is not None:
        check_int("layer_id", layer_id, 0, _MOST_LAYERS)
    if not isinstance(key.model_name, str):
        raise FormatError(f"model_name is a str, not {key.model_name!r:.80}")
    hash_type, chunk_hash = _packed(key.chunk_hash)
    fields = (
        _MARK,
        fmt or "",
        "" if dtype is None else dtype_name(dtype),
        "" if layer_id is None else str(layer_id),
        hash_type,
        key.model_name,
    )
    kv_rank = share_rank(key.world_size, key.worker_id)
    return ObjectKey(chunk_hash, "@".join(fields), kv_rank)


def engine_key_of(object_key: ObjectKey) -> AnyKey:
    """The `CacheEngineKey` or `LayerCacheEngineKey` for which an ObjectKey stands.

    The ObjectKey itself if it stands for itself, or for a key that these classes cannot be.
    """
    mark, *fields = object_key.model_name.split("@", 5)
    if mark != _MARK or len(fields) < 5:
        return object_key
    fmt, dtype, layer_id, hash_type, model_name = fields
    try:
        named = {
            "fmt": fmt or None,
            "model_name": model_name,
            "world_size": object_key.kv_rank >> 24,
            "worker_id": object_key.kv_rank >> 16 & 0xFF,
            "chunk_hash": _unpacked(hash_type, object_key.chunk_hash),
            "dtype": torch_dtype(dtype) if dtype else None,
        }
        key = CacheEngineKey(**named)
        if layer_id:
            key = LayerCacheEngineKey(**named, layer_id=int(layer_id))
        return key if object_key_of(key) == object_key else object_key
    except ValueError:  # a name that only looks like one of these, or that they refuse
        return object_key


def _packed(chunk_hash: object) -> tuple[str, bytes]:
    """The type of a hash, and its bytes."""
    if isinstance(chunk_hash, bytes):
        return "bytes", chunk_hash
    if isinstance(chunk_hash, str):
        if _HEX.fullmatch(chunk_hash):
            return "hex", bytes.fromhex(chunk_hash)
        try:
            return "text", chunk_hash.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"a chunk_hash that UTF-8 cannot encode: {error}") from None
    if type(chunk_hash) is int:
        return "int", b"%d" % chunk_hash
    raise FormatError(f"chunk_hash is a str, an int or bytes, not {type(chunk_hash).__name__}")


def _unpacked(hash_type: str, data: bytes) -> str | int | bytes:
    """The inverse of `_packed`. Raises ValueError for what it does not return."""
    if hash_type == "bytes":
        return data
    if hash_type == "hex":
        return data.hex()
    if hash_type == "text":
        return data.decode("utf-8")
    if hash_type == "int":
        return int(data)
    raise ValueError(f"unknown type of a chunk hash: {hash_type!r}")
