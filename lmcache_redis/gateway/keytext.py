"""Key texts of LMCache, and the tiers' keys that stand for them.

A key text is `model@world_size@worker_id@chunk_hash@dtype`, then `@layer_id` for one layer's
part of a chunk, then any number of `@tag%value`. LMCache writes a hash that is bytes as hex, and
one that is an int in base 16 as short as it goes: with an odd number of digits, or a minus.

In an ObjectKey the model name is the key text with another hash field, so that nothing is lost:

    field empty   the hash is bytes, and these are the chunk hash
    field `~`     the chunk hash is the ASCII text of the field

The empty field is used where the text is lower-case hex of whole bytes, `~` otherwise: for every
text there is one key. Model names of the engine plane contain `@` only in ways that this strict
reading rejects, so keys of others in the same tier are told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.lm_wire import MAX_KEY_LENGTH

_TEXT_HASH = "~"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_HASH = re.compile(r"-?[0-9a-f]+", re.ASCII)
_WHOLE_BYTES = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)
_DTYPE = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyText:
    """The fields of a key text. chunk_hash is text too; layer_id is None for a whole chunk."""

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str
    dtype: str
    layer_id: int | None = None
    tags: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(text: str) -> KeyText:
        """Raises FormatError for anything but a key text."""
        if not text.isprintable() or text != text.strip():
            raise FormatError(f"a key text is printable, without spaces around it: {text!r:.200}")
        if len(text.encode("utf-8")) > MAX_KEY_LENGTH:
            raise FormatError(f"a key text of more than {MAX_KEY_LENGTH} bytes")
        fields = text.split("@")
        if len(fields) < 5 or not fields[0]:
            raise FormatError(
                f"a key text is model@world_size@worker_id@hash@dtype..., not {text!r:.200}"
            )
        model_name, world_size, worker_id, chunk_hash, dtype, *rest = fields
        if not _HASH.fullmatch(chunk_hash):
            raise FormatError(f"a hash is lower-case hex, not {chunk_hash!r:.200}")
        if not _DTYPE.fullmatch(dtype):
            raise FormatError(f"no name of a dtype: {dtype!r:.200}")
        layer_id = _number(rest.pop(0)) if rest and "%" not in rest[0] else None
        return KeyText(
            model_name, _number(world_size), _number(worker_id), chunk_hash, dtype, layer_id,
            tuple(map(_tag, rest)),
        )  # fmt: skip

    def format(self) -> str:
        """The text; raises FormatError unless `parse` reads the same fields from it."""
        text = self._text(self.chunk_hash)
        if KeyText.parse(text) != self:
            raise FormatError(f"fields that make no key text: {text!r:.200}")
        return text

    def object_key(self) -> ObjectKey:
        """The key in a tier. Raises FormatError where a field does not fit into one."""
        if _WHOLE_BYTES.fullmatch(self.chunk_hash):
            chunk_hash, field = bytes.fromhex(self.chunk_hash), ""
        else:
            chunk_hash, field = self.chunk_hash.encode("ascii"), _TEXT_HASH
        size, worker = self.world_size, self.worker_id
        kv_rank = ObjectKey.ComputeKVRank(size, worker, size, worker)
        return ObjectKey(chunk_hash, self._text(field), kv_rank)

    def _text(self, hash_field: str) -> str:
        fields = [self.model_name, str(self.world_size), str(self.worker_id), hash_field]
        fields.append(self.dtype)
        if self.layer_id is not None:
            fields.append(str(self.layer_id))
        fields += [f"{name}%{value}" for name, value in self.tags]
        return "@".join(fields)


def object_key_of(text: str) -> ObjectKey:
    """The key in a tier of a key text. Raises FormatError for anything else."""
    return KeyText.parse(text).object_key()


def key_text_of(key: ObjectKey) -> str:
    """The inverse of `object_key_of`. Raises FormatError for a key that it never gives."""
    fields = key.model_name.split("@")
    if len(fields) < 5 or fields[3] not in ("", _TEXT_HASH):
        raise FormatError(f"the key of a chunk that no key text names: {key!r:.200}")
    try:
        fields[3] = key.chunk_hash.decode("ascii") if fields[3] else key.chunk_hash.hex()
    except UnicodeDecodeError:
        raise FormatError(f"a chunk hash that is no text: {key!r:.200}") from None
    text = "@".join(fields)
    if object_key_of(text) != key:
        raise FormatError(f"the key of a chunk that no key text names: {key!r:.200}")
    return text


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise FormatError(f"not a plain number: {text!r:.200}")
    return int(text)


def _tag(text: str) -> tuple[str, str]:
    name, percent, value = text.partition("%")
    if not name or not percent:
        raise FormatError(f"a tag is name%value, not {text!r:.200}")
    return name, value
