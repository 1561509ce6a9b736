# SPDX-License-Identifier: Apache-2.0
"""Keys, layouts, sizes and ages as text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_redis.chunks.keys import KEY_MAGIC, NAMESPACE_BYTES, ObjectKey
from lmcache_redis.chunks.names import DESCRIPTIONS, parse_stripe_key, stripe_key
from lmcache_redis.errors import ConfigError, FormatError

_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")
_LAYOUT_DIGITS = re.compile(r"[0-9a-f]{16,64}")
_SHOWN = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 13: "\\r", 34: '\\"', 92: "\\\\"}
# What redis-cli prints before each element of a list.
_LIST_NUMBER = re.compile(r"^\s*\d+\)\s+")
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DESCRIPTIONS = DESCRIPTIONS.hex()[:NAMESPACE_BYTES].encode()
_TEXT_NAMESPACE = re.compile(rb"[0-9a-f]{16}")


class WorkerRanks(NamedTuple):
    """The worker that stored a chunk."""

    world_size: int
    rank: int
    local_world_size: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class ChunkName:
    """The chunk that a Redis key names: the key prefix, the namespace (16 bytes) and the rest."""

    prefix: bytes
    namespace: bytes
    key: ObjectKey

    @property
    def chunk_key(self) -> bytes:
        """The key of each of its stripes, without the stripe index."""
        return self.prefix + KEY_MAGIC + self.namespace + self.key.to_bytes()

    @property
    def is_description(self) -> bool:
        """Whether the key is that of a description of a layout, not of a chunk."""
        return self.namespace == _DESCRIPTIONS

    @property
    def layout(self) -> str:
        """The namespace as `status` shows it, or in hex; in brackets: of no layout."""
        if self.is_description:
            return "(descriptions)"
        is_text = _TEXT_NAMESPACE.fullmatch(self.namespace)
        return self.namespace.decode() if is_text else self.namespace.hex()

    @property
    def shown_prefix(self) -> str:
        return show_key(self.prefix)[1:-1]

    @property
    def ranks(self) -> WorkerRanks:
        return WorkerRanks(*self.key.kv_rank.to_bytes(4, "big"))

    def stripe(self, index: int) -> bytes:
        """The Redis key of one of its stripes."""
        return stripe_key(self.chunk_key, index)


def parse_name(data: bytes, prefix: bytes) -> tuple[ChunkName, int | None]:
    """The chunk and the stripe that a key names; None for a chunk key. Raises FormatError."""
    try:
        namespace, key, index = parse_stripe_key(data, prefix)
        return ChunkName(prefix, namespace, key), index
    except FormatError:
        # A key contains the lengths of its parts: none is both a stripe's and a chunk's.
        namespace, key, _ = parse_stripe_key(stripe_key(data, 0), prefix)
        return ChunkName(prefix, namespace, key), None


def read_key(text: str) -> bytes:
    """A key in hex, with escapes such as \\xNN, or as redis-cli prints it. Raises ConfigError."""
    text = _LIST_NUMBER.sub("", text).strip()
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        raw = text.encode("utf-8", "surrogateescape")
        return raw.decode("unicode_escape").encode("latin-1")
    except UnicodeError:
        raise ConfigError(f"the key {text:.40}... has a wrong escape: copy it whole") from None


def show_key(data: bytes) -> str:
    """A key as redis-cli prints it, quotes included; `read_key` is the inverse."""
    plain = (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)
    return '"' + "".join(_SHOWN.get(b, p) for b, p in zip(data, plain, strict=True)) + '"'


def read_layout(text: str) -> str:
    """The digits of a layout that all its chunks share. Raises ConfigError for other text."""
    digits = text.strip().lower()
    if not _LAYOUT_DIGITS.fullmatch(digits):
        raise ConfigError(
            f"--layout {text!r} is not a layout: give all digits that `lmcache-redis inspect` shows"
        )
    return digits[:NAMESPACE_BYTES]


def namespaces_of(fingerprint: bytes) -> frozenset[bytes]:
    """The possible namespaces of a layout: the start of its fingerprint, as bytes or in hex."""
    return frozenset({fingerprint[:NAMESPACE_BYTES], fingerprint.hex()[:NAMESPACE_BYTES].encode()})


def read_age(option: str, text: str | None) -> float | None:
    """Seconds of `45s`, `30m`, `12h`, `7d` or `2w`. Raises ConfigError for any other text."""
    if text is None:
        return None
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"{option} {text!r} is not a duration: write it as 45s, 30m, 12h, 7d or 2w"
        )
    return float(match.group(1)) * _AGE_UNITS[match.group(2)]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines in which the cells of a column begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
