# SPDX-License-Identifier: Apache-2.0
"""Reads traces from files of JSON lines.

hash_ids    ``hash_ids`` (one for each block of the prompt) and, if known, ``timestamp`` (ms)
            and ``input_length`` (tokens): Mooncake's
recording   what an agent's `--record` writes (`records`)
KV events   what vLLM publishes, one batch a line as its msgpack decodes to

    [1718000000.5, [{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ...,
                     "token_ids": [...], "block_size": 16, ...}], 0]

Source: ``vllm/distributed/kv_events.py``. ``token_ids`` may be left out: they are not read.

An event tells that blocks are in the engine's own cache now: they were computed, or loaded. What
the engine's cache served has no event. So the trace is what is left for a cache behind it, and a
block that is stored again is a hit that such a cache could have had.

Blocks that continue the last block of an earlier event belong to its request. Where they come
singly they were generated: a prompt's come several at a time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.errors import ConfigError, FormatError
from lmcache_redis.plan import records
from lmcache_redis.plan.traces import BlockLayout, Trace, TraceColumns, prefix_numbers
from lmcache_redis.tier_kinds import HOST, KINDS

# After so long the continuation of a prompt is another turn of its conversation.
_SAME_REQUEST_S = 60.0
_GPU = (None, "GPU")


def read_trace(paths: Sequence[Path], block_tokens: int, token_bytes: int) -> Trace:
    """The trace in one or several files of the same kind.

    block_tokens, token_bytes: what files do not say. Raises ``FormatError``, which names file and
    line, and ``ConfigError`` for a file that cannot be read.
    """
    where = files = ", ".join(map(str, paths))
    reader = None
    try:
        for each in _lines(paths):
            where, line = each
            if reader is None:
                reader = _reader_of(line, block_tokens, token_bytes)
            reader.add(line)
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


def _reader_of(
    line: bytes, block_tokens: int, token_bytes: int
) -> _KvEvents | _Prompts | _Recording:
    """What takes the lines of a trace that begins with this one."""
    found = msgspec.json.decode(line)
    if isinstance(found, list):
        return _KvEvents(token_bytes)
    if isinstance(found, dict) and "hash_ids" in found:
        return _Prompts(block_tokens, token_bytes)
    if isinstance(found, dict) and found.get("type") in ("start", "layout", "lookup"):
        return _Recording()
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

    _decoder = msgspec.json.Decoder(_Prompt)

    def __init__(self, block_tokens: int, token_bytes: int) -> None:
        self._columns = TraceColumns()
        self._numbers: dict[tuple[int, int | str], int] = {}
        self._layout = _uniform_blocks(block_tokens, token_bytes)
        self._has_times = False

    def add(self, line: bytes) -> None:
        prompt = self._decoder.decode(line)
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
        self._columns.add(
            time_s, prefix_numbers(self._numbers, ids[:whole]), tokens=length, asked=whole
        )

    def trace(self) -> Trace:
        unknown = "The trace has no times: link and savings a month are not known."
        notes = [] if self._has_times else [unknown]
        return self._columns.trace(self._layout, has_times=self._has_times, notes=notes)


class _KvEvent(msgspec.Struct):
    """Of any kind; fields that others have do not matter."""

    type: str
    block_hashes: list[int | str] = []
    parent_block_hash: int | str | None = None
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


class _KvEventBatch(msgspec.Struct, array_like=True):
    """A line."""

    ts: float
    events: list[_KvEvent]
    data_parallel_rank: Any = None


@dataclass
class _StoredRequest:
    """Blocks that followed one another. The first ``asked`` are of the prompt."""

    time_s: float
    blocks: list[int | str] = field(default_factory=list)
    asked: int = 0


class _KvEvents:
    """The events of a trace while it is read."""

    _decoder = msgspec.json.Decoder(_KvEventBatch)

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._block_tokens = 0
        self._requests: list[_StoredRequest] = []
        self._ends: dict[int | str, _StoredRequest] = {}  # by the last block

    def add(self, line: bytes) -> None:
        batch = self._decoder.decode(line)
        for event in batch.events:
            # A group's blocks cover the same tokens as those of the first one.
            of_others = event.medium not in _GPU or event.group_idx
            if event.type != "BlockStored" or of_others or not event.block_hashes:
                continue
            if event.block_size < 1 or self._block_tokens not in (0, event.block_size):
                raise FormatError(
                    f"a block of {event.block_size} tokens among others of {self._block_tokens}"
                )
            self._block_tokens = event.block_size
            self._add_blocks(batch.ts, event)

    def _add_blocks(self, time_s: float, event: _KvEvent) -> None:
        parent = event.parent_block_hash
        request = None if parent is None else self._ends.pop(parent, None)
        if request is None or time_s - request.time_s > _SAME_REQUEST_S:
            request = _StoredRequest(time_s)
            self._requests.append(request)
        is_prompt = not request.blocks or len(event.block_hashes) > 1
        if is_prompt and request.asked == len(request.blocks):
            request.asked += len(event.block_hashes)
        request.blocks += event.block_hashes
        self._ends[event.block_hashes[-1]] = request

    def trace(self) -> Trace:
        if not self._requests:
            raise FormatError("there is no BlockStored event of the GPU's cache")
        columns, numbers = TraceColumns(), dict[int | str, int]()
        for each in self._requests:
            ids = [numbers.setdefault(block, len(numbers)) for block in each.blocks]
            columns.add(each.time_s, ids, asked=each.asked)
        layout = _uniform_blocks(self._block_tokens, self._token_bytes)
        note = (
            "KV events do not tell what the engine's own cache has served: hits are of what it had "
            "not"
        )
        return columns.trace(layout, notes=[note])


class _Recording:
    """A recording while it is read. Chunks of other weights, so other layouts, are other chunks."""

    _decoder = msgspec.json.Decoder(records.Line)

    def __init__(self) -> None:
        self._columns = TraceColumns()
        self._layout: BlockLayout | None = None
        # The layout that is meant by its own name, or by that of a part.
        self._layout_of: dict[str, str] = {}
        # The chunks of each request that were named.
        self._requests: dict[str, set[int]] = {}
        self._hits = {kind.letter: 0 for kind in KINDS}
        self._token_s = array("d")
        self._dropped = 0

    def add(self, line: bytes) -> None:
        """Raises KeyError for a layout that is not known."""
        match self._decoder.decode(line):
            case records.LayoutRecord() as record:
                self._add_layout(record)
            case records.LookupRecord() as record:
                self._add_lookup(record)
            case records.StoreRecord() as record:
                self._add_store(record)
            case records.DroppedRecord(lines=lines):
                self._dropped += lines

    def _add_layout(self, record: records.LayoutRecord) -> None:
        layout = _sizes_of(record)
        if self._layout not in (None, layout):
            raise FormatError(
                "chunks of another size than before: a plan is of one model and chunk size, so "
                "leave out the lines of others"
            )
        self._layout = layout
        names = (record.name, *(row.part for row in record.rows))
        self._layout_of.update(dict.fromkeys(names, record.name))

    def _add_lookup(self, record: records.LookupRecord) -> None:
        ids = self._ids(record.layout, record.chunks)
        self._requests[record.request] = set(ids)
        self._columns.add(record.time, ids, asked=len(ids), first=record.first_chunk)
        for letter in record.hits:
            self._hits[letter] += 1
        if record.token_s:
            self._token_s.append(record.token_s)

    def _add_store(self, record: records.StoreRecord) -> None:
        """Of a prompt's chunks the lookup has told already, and of others another rank."""
        known = self._requests.setdefault(record.request, set())
        ids = [each for each in self._ids(record.part, record.chunks) if each not in known]
        known.update(ids)
        if ids:
            self._columns.add(record.time, ids)

    def _ids(self, layout_or_part: str, chunks: str) -> list[int]:
        layout = self._layout_of[layout_or_part]
        return [hash((layout, name)) for name in records.names_of(chunks)]

    def trace(self) -> Trace:
        asked = sum(self._columns.asked)
        shares = {kind: self._hits[kind.letter] / max(1, asked) for kind in KINDS}
        rates = {f"hit_rate_{kind.name}": share for kind, share in shares.items()}
        rates["hit_rate_pool"] = rates.pop(f"hit_rate_{HOST.name}")
        rate = sum(shares.values())
        by_tier = ", ".join(f"{kind.title} {share:.1%}" for kind, share in shares.items())
        notes = [f"While it was recorded the agent had a hit rate of {rate:.1%}: {by_tier}."]
        if self._dropped:
            notes.append(f"The agent left out {self._dropped} lines, because it was too busy.")
        return self._columns.trace(
            self._layout,
            token_s=float(np.median(self._token_s)) if self._token_s else 0.0,
            measured={"asked_chunks": asked, "hit_rate": rate, **rates},
            notes=notes,
        )


def _sizes_of(record: records.LayoutRecord) -> BlockLayout:
    part_bytes: Counter[Reach] = Counter()
    for row in record.rows:
        part_bytes[Reach(row.reach, row.reach_tokens)] += row.bytes
    return BlockLayout(record.chunk_tokens, sum(row.pool_bytes for row in record.rows), part_bytes)


def _uniform_blocks(block_tokens: int, token_bytes: int) -> BlockLayout:
    """Of one part each, which takes in every tier what its tokens take."""
    nbytes = max(1, block_tokens * token_bytes)
    return BlockLayout(block_tokens, nbytes, {FULL_REACH: nbytes})
