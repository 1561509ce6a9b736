"""lmcache.utils: the keys of chunks, and of one layer of a chunk, in LMCache's TCP protocol.

The text of a key, which `to_string` writes and `from_string` reads:

    [fmt@]model_name@world_size@worker_id@chunk_hash[@dtype][@layer_id][@tag%value]...

Earlier versions of LMCache have a format (`vllm`) in front, later ones a dtype behind the hash.
Both are read and written. Malformed fields and texts raise FormatError, which is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_redis.chunks.metadata import torch_dtype
from lmcache_redis.errors import FormatError

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
_BYTES_HASH = re.compile(r"(?:[0-9a-f]{2})+")
_TAG = "lmcache.tag."

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
            raise FormatError(f"fields that cannot be read back from the text {self._text!r:.200}")

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

    @staticmethod
    def from_string(s: str) -> CacheEngineKey:
        """The inverse of `to_string`. Raises FormatError for the text of a layer's key.

        chunk_hash is an int, as in LMCache; bytes if leading zeros would be lost; else the text.
        """
        key = parse_cache_key(s)
        if isinstance(key, LayerCacheEngineKey):
            raise FormatError(f"the key of a layer, not of a chunk: {s!r:.200}")
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

    @staticmethod
    def from_string(s: str) -> LayerCacheEngineKey:
        """The inverse of `to_string`. Raises FormatError for the text of a chunk's key."""
        key = parse_cache_key(s)
        if not isinstance(key, LayerCacheEngineKey):
            raise FormatError(f"the key of a chunk, not of a layer: {s!r:.200}")
        return key


def parse_cache_key(key_str: str) -> CacheEngineKey | LayerCacheEngineKey:
    """The key of a text, of a chunk or of a layer. Raises FormatError if it is malformed."""
    texts = _groups(key_str) if isinstance(key_str, str) else None
    if texts is None:
        raise FormatError(f"not the text of a key: {key_str!r:.200}")
    chunk_hash, layer_id = str(texts["chunk_hash"]), texts["layer_id"]
    tags = [tag.partition("%") for tag in str(texts["tags"]).split("@")[1:]]
    values = (
        texts["fmt"],
        texts["model_name"],
        int(texts["world_size"] or 0),
        int(texts["worker_id"] or 0),
        _hash_of(chunk_hash),
        torch_dtype(_NAME_OF_TEXT[texts["dtype"]]) if texts["dtype"] else None,
        {_TAG + name: value for name, _, value in tags} or None,
    )
    if layer_id is None:
        return CacheEngineKey(*values)
    return LayerCacheEngineKey(*values, layer_id=int(layer_id))


def _groups(text: str) -> dict[str, str | None] | None:
    match = KEY_TEXT.fullmatch(text)
    if match is None or not match["chunk_hash"] or not (match["fmt"] or match["dtype"]):
        return None
    return match.groupdict() if match["dtype"] in (None, *_NAME_OF_TEXT) else None


def _hash_of(text: str) -> int | bytes | str:
    if _INT_HASH.fullmatch(text):
        return int(text, 16)
    return bytes.fromhex(text) if _BYTES_HASH.fullmatch(text) else text
