# SPDX-License-Identifier: Apache-2.0
"""The file that an agent's `--record FILE` writes and `lmcache-redis plan` reads: a JSON line each.

    start      a process has begun to write; also the first line of each file
    layout     how large the chunks are that later lines name
    lookup     one lookup, when it is answered: which chunks were asked for, and where each hit was
    store      chunks that a worker hands to the agent
    dropped    how many lines were not written

Times are seconds since 1970. A chunk's name is the xxh3-64 of its hash: 16 hex digits, one chunk
after the other in one string. Neither tokens nor text can be found from it. ``request`` is made
from the request's id in the same way, and ``part`` from what the keys of a worker's chunks begin
with.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lmcache_redis.errors import FormatError
from lmcache_redis.tier_kinds import KINDS

NAME_DIGITS = 16

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_LETTERS = "".join(kind.letter for kind in KINDS)


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A line."""

    time: _Seconds


class StartRecord(Recorded, frozen=True, tag="start", kw_only=True):
    """version: of the format."""

    version: Literal[1] = 1


class RowRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of each chunk: its bytes, what it takes of the host pool, and its `Reach`."""

    part: str
    bytes: _Bytes
    pool_bytes: _Bytes
    reach: Literal["all", "window", "local", "state"] = "all"
    reach_tokens: int = 0


class LayoutRecord(Recorded, frozen=True, tag="layout", kw_only=True):
    """name: what lookups call it."""

    name: str
    model: str
    chunk_tokens: _Tokens
    rows: tuple[RowRecord, ...]


class LookupRecord(Recorded, frozen=True, tag="lookup", kw_only=True):
    """time: of the question. first_chunk: the chunks before are in the engine.

    hits: for each leading chunk found, the letter of its kind of tier: h, d or r. token_s: in which
    the engine computes a token; 0: not measured.
    """

    request: str
    layout: str
    chunks: str
    first_chunk: _Count = 0
    hits: Annotated[str, msgspec.Meta(pattern=f"^[{_LETTERS}]*$")] = ""
    token_s: _Seconds = 0.0


class StoreRecord(Recorded, frozen=True, tag="store", kw_only=True):
    """part: of the chunks, in a layout."""

    request: str
    part: str
    chunks: str


class DroppedRecord(Recorded, frozen=True, tag="dropped", kw_only=True):
    """lines: that the writer was too slow for."""

    lines: _Count


Line = StartRecord | LayoutRecord | LookupRecord | StoreRecord | DroppedRecord


def names_of(chunks: str) -> list[str]:
    """The chunks' names in a line. Raises ``FormatError``."""
    if len(chunks) % NAME_DIGITS:
        raise FormatError(f"chunks has {len(chunks)} digits, which is no multiple of {NAME_DIGITS}")
    return [chunks[at : at + NAME_DIGITS] for at in range(0, len(chunks), NAME_DIGITS)]
