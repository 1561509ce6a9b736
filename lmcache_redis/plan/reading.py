"""Reads traces from files of JSON lines.

hash_ids    ``hash_ids`` (one for each block of the prompt) and, if known, ``timestamp`` (ms)
            and ``input_length`` (tokens): Mooncake's
recording   what an agent's `--record` writes (`records`)
KV events   what vLLM publishes (`events`)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np

from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.plan import events, records
from lmcache_redis.plan.traces import BlockLayout, Measured, SizedRow, Trace, TraceColumns


class _Prompt(msgspec.Struct):
    """A line of Mooncake's or another trace with ``hash_ids``. Other fields do not matter."""

    hash_ids: list[int | str]
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    input_length: int | None = None


def read_trace(paths: Sequence[Path], block_tokens: int, token_bytes: int) -> Trace:
    """The trace in one or several files of the same kind.

    block_tokens, token_bytes: what files do not say. Raises ``FormatError``, which names file and
    line, and ``ConfigError`` for a file that cannot be read.
    """
    lines = _lines(paths)
    first = next(lines, None)
    if first is None:
        raise FormatError(f"{', '.join(map(str, paths))}: the trace is empty")
    kind, everything = _kind(*first), chain([first], lines)
    try:
        if kind == "recording":
            return _read_recording(everything)
        if kind == "events":
            return _read_events(everything, token_bytes)
        return _read_prompts(everything, block_tokens, token_bytes)
    except FormatError as error:
        if "line " in str(error):
            raise
        raise FormatError(f"{', '.join(map(str, paths))}: {error}") from error


Numbered = tuple[str, bytes]  # where a line is, and the line


def _lines(paths: Sequence[Path]) -> Iterator[Numbered]:
    for path in paths:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number} of {path}", line


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another") from error


def _kind(where: str, line: bytes) -> str:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: {error}") from error
    if isinstance(found, dict) and "hash_ids" in found:
        return "prompts"
    if isinstance(found, dict) and found.get("type") in ("start", "layout", "lookup"):
        return "recording"
    if isinstance(found, list) or (isinstance(found, dict) and "events" in found):
        return "events"
    raise FormatError(
        f"{where}: neither a prompt with `hash_ids`, a line of `--record`, nor KV events of vLLM"
    )


def _read_prompts(lines: Iterable[Numbered], block_tokens: int, token_bytes: int) -> Trace:
    columns, decode = TraceColumns(), msgspec.json.Decoder(_Prompt).decode
    has_times = False
    for number, (where, line) in enumerate(lines):
        try:
            prompt = decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise FormatError(f"{where}: {error}") from error
        ids, length = prompt.hash_ids, prompt.input_length
        if length is None:
            length = len(ids) * block_tokens
        elif not 0 <= length <= len(ids) * block_tokens:
            raise FormatError(
                f"{where}: {len(ids)} blocks of {block_tokens} tokens do not hold input_length "
                f"{length}: set --block-tokens"
            )
        if prompt.timestamp is not None:
            has_times = True
        time_s = number if prompt.timestamp is None else prompt.timestamp / 1000
        whole = min(len(ids), length // block_tokens)
        columns.add(time_s, ids[:whole], tokens=length, asked=whole)
    nbytes = block_tokens * token_bytes
    layout = BlockLayout(block_tokens, (SizedRow(nbytes, nbytes),))
    return columns.trace([layout], is_chained=False, has_times=has_times)


def _read_events(lines: Iterable[Numbered], token_bytes: int) -> Trace:
    columns = TraceColumns()
    found = events.requests_of(lines)
    nbytes = found.block_tokens * token_bytes
    for request in found.requests:
        columns.add(
            request.time_s,
            request.blocks,
            tokens=request.asked * found.block_tokens,
            asked=request.asked,
        )
    layout = BlockLayout(found.block_tokens, (SizedRow(nbytes, nbytes),))
    return columns.trace([layout], is_chained=True, notes=(events.NOTE,))


def _read_recording(lines: Iterable[Numbered]) -> Trace:
    recording, decode = _Recording(), msgspec.json.Decoder(records.Line).decode
    for where, line in lines:
        try:
            recording.add(decode(line))
        except (msgspec.DecodeError, ValueError) as error:  # noqa: PERF203
            raise FormatError(f"{where}: {error}") from error
        except KeyError as error:
            raise FormatError(f"{where}: no line before describes {error}") from error
    return recording.trace()


class _Recording:
    """A recording while it is read."""

    def __init__(self) -> None:
        self._columns = TraceColumns()
        self._layouts: dict[str, int] = {}
        self._sizes: list[BlockLayout] = []
        self._of_part: dict[str, int] = {}
        # The layout of each request, and the chunks that were named.
        self._requests: dict[str, tuple[int, set[str]]] = {}
        self._hits = {"h": 0, "d": 0, "r": 0}
        self._token_s = array("d")
        self._dropped = 0

    def add(self, record: records.Line) -> None:
        """Raises ValueError, and KeyError for a layout that is not known."""
        if isinstance(record, records.LayoutRecord):
            self._add_layout(record)
        elif isinstance(record, records.LookupRecord):
            self._add_lookup(record)
        elif isinstance(record, records.StoreRecord):
            self._add_store(record)
        elif isinstance(record, records.DroppedRecord):
            self._dropped += record.lines

    def _add_layout(self, record: records.LayoutRecord) -> None:
        if record.name not in self._layouts:
            self._layouts[record.name] = len(self._sizes)
            self._sizes.append(_sizes_of(record))
        self._of_part.update((row.part, self._layouts[record.name]) for row in record.rows)

    def _add_lookup(self, record: records.LookupRecord) -> None:
        number, names = self._layouts[record.layout], records.names_of(record.chunks)
        self._requests[record.request] = number, set(names)
        tokens = len(names) * self._sizes[number].block_tokens
        self._columns.add(
            record.time,
            _numbers(names),
            tokens=tokens,
            asked=len(names),
            first=record.first_chunk,
            layout=number,
        )
        for letter in record.hits:
            self._hits[letter] += 1
        if record.token_s:
            self._token_s.append(record.token_s)

    def _add_store(self, record: records.StoreRecord) -> None:
        """Of a prompt's chunks the lookup has told already, and of others another rank."""
        of_part = self._of_part[record.part]
        number, known = self._requests.setdefault(record.request, (of_part, set()))
        names = [name for name in records.names_of(record.chunks) if name not in known]
        known.update(names)
        if names:
            self._columns.add(record.time, _numbers(names), layout=number)

    def trace(self) -> Trace:
        dropped = f"the agent left out {self._dropped} lines, because it was too busy"
        return self._columns.trace(
            self._sizes,
            is_chained=True,
            token_s=float(np.median(self._token_s)) if self._token_s else 0.0,
            measured=Measured(sum(self._columns.whole["asked"]), self._hits),
            notes=(dropped,) if self._dropped else (),
        )


def _numbers(names: Sequence[str]) -> list[int]:
    """As signed numbers of 64 bits."""
    return [int(name, 16) - (1 << 63) for name in names]


def _sizes_of(record: records.LayoutRecord) -> BlockLayout:
    rows = []
    for row in record.rows:
        reach = msgspec.convert({"kind": row.reach, "tokens": row.reach_tokens}, Reach)
        rows.append(SizedRow(row.bytes, row.pool_bytes, reach))
    return BlockLayout(record.chunk_tokens, tuple(rows))
