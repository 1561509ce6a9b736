# SPDX-License-Identifier: Apache-2.0
"""lmcache.utils: the keys of chunks, and of one layer of a chunk, in LMCache's TCP protocol.

The text of a key, which `to_string` writes and `from_string` reads:

    [fmt@]model_name@world_size@worker_id@chunk_hash[@dtype][@layer_id][@tag%value]...

Earlier versions of LMCache have a format (`vllm`) in front, later ones a dtype behind the hash.
Both are read and written. Malformed fields and texts raise FormatError, which is a ValueError.

A storage backend takes any object with model_name, world_size, worker_id and chunk_hash; and with
fmt, dtype and layer_id where its release of LMCache has them. Each is part of the key: chunks of
"vllm" and of "huggingface" never meet, nor do the layers of a chunk. Its ObjectKey has

    chunk_hash   the hash as bytes
    model_name   lmcache@fmt@dtype@layer_id@hash type@model_name; a field that is not given is empty
    kv_rank      world_size and worker_id, of workers on one node

    hash type    the hash of the key
    bytes        bytes
    hex          a str of lower-case hex, two digits a byte: a SHA-256 has 32 bytes
    text         any other str, in UTF-8
    int          an int, in decimal digits

So unequal keys have unequal ObjectKeys, up to collisions of digests: an ObjectKey has the digest of
a hash of over 63 bytes (`chunks.keys.bounded_hash`), and so has whatever a list makes of it. An
ObjectKey stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lmcache_redis.chunks.keys import ObjectKey, share_rank
from lmcache_redis.chunks.metadata import dtype_name, torch_dtype
from lmcache_redis.errors import FormatError, check_int

if TYPE_CHECKING:
    import torch

_NAME_OF_TEXT = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    **{f"fp8_{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
    **{name: name for name in ["bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"]},
}
_TEXT_OF_NAME = {name: text for text, name in _NAME_OF_TEXT.items()}

_INT = r"(?:0|[1-9]\d{0,9})"
# A format is followed by a name, a name without one by a number.
KEY_TEXT = re.compile(
    rf"(?:(?P<fmt>[^@]+)@(?!\d+@))?(?P<model_name>[^@]+)@(?P<world_size>{_INT})"
    rf"@(?P<worker_id>{_INT})@(?P<chunk_hash>[^@]*)(?:@(?P<dtype>[a-z][a-z0-9_]*))?"
    rf"(?:@(?P<layer_id>{_INT}))?(?P<tags>(?:@[^@%]+%[^@]*)*)",
    re.ASCII,
)
_INT_HASH = re.compile(r"0|-?[1-9a-f][0-9a-f]*")
BYTES_HASH = re.compile(r"(?:[0-9a-f]{2})+")
_TAG = "lmcache.tag."
_MARK = "lmcache"
_ALWAYS = ("model_name", "world_size", "worker_id", "chunk_hash")
_OPTIONAL = ("fmt", "dtype", "layer_id")
_MOST_LAYERS = 1 << 16

# An ObjectKey, or any object with the fields of a key of LMCache.
AnyKey: TypeAlias = Any


_Key = TypeVar("_Key", bound="CacheEngineKey")


@dataclass(frozen=True, eq=False)
class _KeyParts:
    fmt: str | None
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int | bytes | str
    dtype: torch.dtype | None = None
    request_configs: Mapping[str, Any] | None = None
    layer_id: Any = None  # an int in the key of a layer

    def __post_init__(self) -> None:
        if self.dtype is not None and not self._dtype_text:
            raise FormatError(f"a key has no text for the dtype {self.dtype!r:.80}")
        has_layer = self.layer_id is not None
        if _groups(self._text) != self._texts or has_layer != isinstance(self, LayerCacheEngineKey):
            raise FormatError(
                f"the text {self._text!r:.200} does not give back the fields of its key"
            )

    @cached_property
    def _texts(self) -> dict[str, str | None]:
        """The groups of `KEY_TEXT`."""
        return {
            "fmt": self.fmt,
            "model_name": self.model_name,
            "world_size": str(self.world_size),
            "worker_id": str(self.worker_id),
            "chunk_hash": self.chunk_hash_hex,
            "dtype": self._dtype_text,
            "layer_id": None if self.layer_id is None else str(self.layer_id),
            "tags": "".join(f"@{name}%{value}" for name, value in self.tags or ()),
        }

    @property
    def _dtype_text(self) -> str | None:
        return _TEXT_OF_NAME.get(str(self.dtype).removeprefix("torch."))

    @cached_property
    def _text(self) -> str:
        *texts, tags = self._texts.values()
        return "@".join(str(text) for text in texts if text is not None) + str(tags)

    @cached_property
    def tags(self) -> tuple[tuple[str, str], ...] | None:
        """Names and values; None if there are none."""
        configs = (self.request_configs or {}).items()
        tags = [(name[len(_TAG) :], str(value)) for name, value in configs if name.startswith(_TAG)]
        return tuple(tags) or None

    @property
    def chunk_hash_hex(self) -> str:
        """The hash as text: bytes as two digits each, an int without leading zeros."""
        if isinstance(self.chunk_hash, bytes):
            return self.chunk_hash.hex()
        return f"{self.chunk_hash:x}" if isinstance(self.chunk_hash, int) else self.chunk_hash


class CacheEngineKey(_KeyParts):
    """The key of a worker's chunk. Immutable; keys of one class and text are equal.

    Arguments, in this order or by name: fmt, model_name, world_size, worker_id, chunk_hash, dtype,
    request_configs. As in later versions of LMCache fmt may be left out if there is a dtype, also
    where arguments are given by position.

    chunk_hash is an int, bytes or text. Of request_configs only the tags belong to the key:
    `{"lmcache.tag.user": "x"}` is the tag `user%x`.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        # What follows the model's name is a number; what follows the format is a name.
        has_fmt = "fmt" in named or (values and "model_name" in named)
        if not has_fmt and not (len(values) > 1 and isinstance(values[1], str)):
            values = (None, *values)
        if isinstance(self, LayerCacheEngineKey) and len(values) < len(fields(self)):
            named.setdefault("layer_id", 0)
        super().__init__(*values, **named)

    def to_string(self) -> str:
        return self._text

    @classmethod
    def from_string(cls: type[_Key], s: str) -> _Key:
        """The inverse of `to_string`. Raises FormatError for the text of a key of the other class.

        chunk_hash is an int, as in LMCache; bytes if leading zeros would be lost; else the text.
        """
        key = parse_cache_key(s)
        if type(key) is not cls:
            raise FormatError(
                f"the text of a {type(key).__name__} names no {cls.__name__}: {s!r:.200}"
            )
        return key

    def split_layers(self, num_layers: int) -> list[LayerCacheEngineKey]:
        """The keys of layers 0 to `num_layers` - 1."""
        return [self._changed(LayerCacheEngineKey, layer_id=layer) for layer in range(num_layers)]

    def get_first_layer(self) -> LayerCacheEngineKey:
        """The key of layer 0."""
        return self._changed(LayerCacheEngineKey, layer_id=0)

    def with_new_worker_id(self: _Key, new_worker_id: int) -> _Key:
        """The same key of another worker."""
        return self._changed(type(self), worker_id=new_worker_id)

    def _changed(self, kind: type[_Key], **changes: Any) -> _Key:
        return kind(**({field.name: getattr(self, field.name) for field in fields(self)} | changes))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_string({self._text!r})"


class LayerCacheEngineKey(CacheEngineKey):
    """The key of one layer of a worker's chunk; arguments as above, and layer_id (0)."""


def parse_cache_key(key_str: str) -> CacheEngineKey | LayerCacheEngineKey:
    """The key of a text, of a chunk or of a layer. Raises FormatError if it is malformed."""
    texts = _groups(key_str) if isinstance(key_str, str) else {}
    if not texts:
        raise FormatError(f"not the text of a key: {key_str!r:.200}")
    tags = [tag.partition("%") for tag in texts["tags"].split("@")[1:]]
    values = (
        texts["fmt"],
        texts["model_name"],
        int(texts["world_size"]),
        int(texts["worker_id"]),
        _hash_of(texts["chunk_hash"]),
        torch_dtype(_NAME_OF_TEXT[texts["dtype"]]) if texts["dtype"] else None,
        {_TAG + name: value for name, _, value in tags} or None,
    )
    if texts["layer_id"] is None:
        return CacheEngineKey(*values)
    return LayerCacheEngineKey(*values, layer_id=int(texts["layer_id"]))


def _groups(text: str) -> dict[str, Any]:
    """The groups of `KEY_TEXT`; empty if it is not the text of a key."""
    match = KEY_TEXT.fullmatch(text)
    if match is None or not match["chunk_hash"] or not (match["fmt"] or match["dtype"]):
        return {}
    return match.groupdict() if match["dtype"] in (None, *_NAME_OF_TEXT) else {}


def _hash_of(text: str) -> int | bytes | str:
    if _INT_HASH.fullmatch(text):
        return int(text, 16)
    return bytes.fromhex(text) if BYTES_HASH.fullmatch(text) else text


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
    """A `CacheEngineKey` or `LayerCacheEngineKey` of this ObjectKey: that which was put, or for a
    hash of over 63 bytes one with its digest, which is the same chunk.

    The ObjectKey itself if it stands for itself, or for a key that these classes cannot be; also
    where a digest cannot be what the hash was, text or an int.
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
            "chunk_hash": _HASH_OF_TYPE[hash_type](object_key.chunk_hash),
            "dtype": torch_dtype(dtype) if dtype else None,
        }
        key = CacheEngineKey(**named)
        if layer_id:
            key = LayerCacheEngineKey(**named, layer_id=int(layer_id))
        return key if object_key_of(key) == object_key else object_key
    except (KeyError, ValueError):  # a name that only looks like one of these, or that they refuse
        return object_key


# The inverse of `_packed`. Raises ValueError.
_HASH_OF_TYPE: dict[str, Callable[[bytes], str | int | bytes]] = {
    "bytes": bytes,
    "hex": bytes.hex,
    "text": bytes.decode,
    "int": int,
}


def _packed(chunk_hash: object) -> tuple[str, bytes]:
    """The type of a hash, and its bytes."""
    if isinstance(chunk_hash, bytes):
        return "bytes", chunk_hash
    if isinstance(chunk_hash, str):
        if BYTES_HASH.fullmatch(chunk_hash):
            return "hex", bytes.fromhex(chunk_hash)
        try:
            return "text", chunk_hash.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"UTF-8 cannot encode a chunk_hash: {error}") from None
    if type(chunk_hash) is int:
        return "int", b"%d" % chunk_hash
    raise FormatError(f"chunk_hash is a str, an int or bytes, not {type(chunk_hash).__name__}")
