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

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_redis.chunks.keys import ObjectKey, share_rank
from lmcache_redis.chunks.metadata import dtype_name, torch_dtype
from lmcache_redis.compat.cache_engine_key import CacheEngineKey, LayerCacheEngineKey
from lmcache_redis.errors import FormatError, check_int

if TYPE_CHECKING:
    import torch

_MARK = "lmcache"
_ALWAYS = ("model_name", "world_size", "worker_id", "chunk_hash")
_OPTIONAL = ("fmt", "dtype", "layer_id")
_MOST_LAYERS = 1 << 16
_HEX = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)


class EngineKey(Protocol):
    """What every key of LMCache has. `object_key_of` takes the other fields if they are there."""

    @property
    def model_name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def worker_id(self) -> int: ...
    @property
    def chunk_hash(self) -> Any: ...


@dataclass(frozen=True)
class KeyFields:
    """The fields of a key that no class of LMCache fits. layer_id: of one layer's part."""

    fmt: str | None
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str | int | bytes
    dtype: torch.dtype | None = None
    layer_id: int | None = None


class KeyKinds:
    """Remembers the classes of the keys that were put, so that a list can return such keys."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, ...], type[Any]] = {}

    def object_key_of(self, key: ObjectKey | EngineKey) -> ObjectKey:
        """`object_key_of` of a key to put."""
        object_key = object_key_of(key)
        if not isinstance(key, ObjectKey):
            self._kinds[_given(key)] = type(key)
        return object_key

    def key_of(self, object_key: ObjectKey) -> ObjectKey | EngineKey:
        """The key for which an ObjectKey stands.

        It has the class of the last put key with the same fields, or is a `CacheEngineKey` or a
        `LayerCacheEngineKey`; `KeyFields` if none of these takes its fields.
        """
        key = engine_key_of(object_key)
        if key is None:
            return object_key
        own = CacheEngineKey if key.layer_id is None else LayerCacheEngineKey
        given = {name: value for name, value in vars(key).items() if value is not None}
        for kind in (self._kinds.get(_given(key), own), own):
            with contextlib.suppress(TypeError, FormatError):
                made: EngineKey = kind(**given)
                return made
        return key


def object_key_of(key: ObjectKey | EngineKey) -> ObjectKey:
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


def engine_key_of(object_key: ObjectKey) -> KeyFields | None:
    """The key for which an ObjectKey stands; None if it stands for itself."""
    fields = object_key.model_name.split("@", 5)
    if len(fields) < 6 or fields[0] != _MARK:
        return None
    _, fmt, dtype, layer_id, hash_type, model_name = fields
    try:
        key = KeyFields(
            fmt or None,
            model_name,
            object_key.kv_rank >> 24,
            object_key.kv_rank >> 16 & 0xFF,
            _unpacked(hash_type, object_key.chunk_hash),
            torch_dtype(dtype) if dtype else None,
            int(layer_id) if layer_id else None,
        )
        return key if object_key_of(key) == object_key else None
    except ValueError:  # a name that only looks like one of these
        return None


def _given(key: EngineKey) -> tuple[bool, ...]:
    return tuple(getattr(key, name, None) is not None for name in _OPTIONAL)


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
