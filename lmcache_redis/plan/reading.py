"""Reads traces from files of JSON lines.

hash_ids    ``hash_ids`` (one for each block of the prompt) and, if known, ``timestamp`` (ms)
            and ``input_length`` (tokens): Mooncake's
recording   what an agent's `--record` writes (`records`)
KV events   what vLLM publishes (`events`)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np

from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.plan import records
from lmcache_redis.plan.events import KvEventBatch, KvEvents
from lmcache_redis.plan.traces import (
    BlockLayout,
    Measured,
    PrefixNumbers,
    SizedRow,
    Trace,
    TraceColumns,
    uniform_blocks,
)


def read_trace(paths: Sequence[Path], block_tokens: int, token_bytes: int) -> Trace:
    """The trace in one or several files of the same kind.

    block_tokens, token_bytes: what files do not say. Raises ``FormatError``, which names file and
    line, and ``ConfigError`` for a file that cannot be read.
    """
    where = files = ", ".join(map(str, paths))
    reader: _TraceReader | None = None
    try:
        for each in _lines(paths):
            where, line = each
            if reader is None:
                reader, decode = _reader_of(line, block_tokens, token_bytes)
            reader.add(decode(line))
        where = files
        if reader is None:
            raise FormatError("the trace is empty")
        return reader.trace()
    except KeyError as error:
        raise FormatError(f"{where}: no line before describes {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"{where}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}): name another"
        ) from error


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Where each line is, and the line."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number} of {path}", line


class _TraceReader(Protocol):
    """Of one kind of trace. Both methods raise ``FormatError``."""

    def add(self, line: Any) -> None: ...

    def trace(self) -> Trace: ...


def _reader_of(
    line: bytes, block_tokens: int, token_bytes: int
) -> tuple[_TraceReader, Callable[[bytes], Any]]:
    """What takes the lines of a trace that begins with this one, and how they are decoded."""
    found = msgspec.json.decode(line)
    if isinstance(found, list):
        return KvEvents(token_bytes), msgspec.json.Decoder(KvEventBatch).decode
    if isinstance(found, dict) and "hash_ids" in found:
        return _Prompts(block_tokens, token_bytes), msgspec.json.Decoder(_Prompt).decode
    if isinstance(found, dict) and found.get("type") in ("start", "layout", "lookup"):
        return _Recording(), msgspec.json.Decoder(records.Line).decode
    raise FormatError(
        "neither a prompt with `hash_ids`, a line of `--record`, nor KV events of vLLM"
    )


class _Prompt(msgspec.Struct):
    """A line of Mooncake's or another trace with ``hash_ids``. Other fields do not matter."""

    hash_ids: list[int | str]
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    input_length: int | None = None


class _Prompts:
    """A trace with ``hash_ids`` while it is read."""

    def __init__(self, block_tokens: int, token_bytes: int) -> None:
        self._columns, self._numbers = TraceColumns(), PrefixNumbers()
        self._layout = uniform_blocks(block_tokens, token_bytes)
        self._has_times = False

    def add(self, prompt: _Prompt) -> None:
        ids, tokens = prompt.hash_ids, self._layout.block_tokens
        length = len(ids) * tokens if prompt.input_length is None else prompt.input_length
        if not 0 <= length <= len(ids) * tokens:
            raise FormatError(
                f"{len(ids)} blocks of {tokens} tokens do not hold input_length {length}: set "
                "--block-tokens"
            )
        time_s = float(len(self._columns.times))
        if prompt.timestamp is not None:
            self._has_times, time_s = True, prompt.timestamp / 1000
        whole = length // tokens
        self._columns.add(time_s, self._numbers.of(ids[:whole]), tokens=length, asked=whole)

    def trace(self) -> Trace:
        return self._columns.trace([self._layout], has_times=self._has_times)


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
        """Raises KeyError for a layout that is not known."""
        match record:
            case records.LayoutRecord():
                self._add_layout(record)
            case records.LookupRecord():
                self._add_lookup(record)
            case records.StoreRecord():
                self._add_store(record)
            case records.DroppedRecord():
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
        whole = {"tokens": tokens, "asked": len(names), "first": record.first_chunk}
        self._columns.add(record.time, _numbers(names), layout=number, **whole)
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
