"""A trace from vLLM's KV events, one batch a line as its publisher's msgpack decodes to.

    [1718000000.5, [{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ...,
                     "token_ids": [...], "block_size": 16, ...}], 0]

or the same with names, ``{"ts": ..., "events": [...]}``. Source: ``vllm/distributed/kv_events.py``.
``token_ids`` may be left out of the file: they are not read.

An event tells that blocks are in the engine's own cache now: they were computed, or loaded. What
the engine's cache served has no event. So the trace is what is left for a cache behind it, and a
block that is stored again is a hit that such a cache could have had.

Blocks that continue the last block of an earlier event belong to its request. Where they come
singly they were generated: a prompt's come several at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_redis.errors import FormatError

NOTE = "KV events do not tell what the engine's own cache has served: hits are of what it had not"

# After so long the continuation of a prompt is another turn of its conversation.
_SAME_REQUEST_S = 60.0
_GPU = (None, "GPU")


class _KvEvent(msgspec.Struct):
    """Of any kind; fields that others have do not matter."""

    type: str
    block_hashes: list[int | str] = []
    parent_block_hash: int | str | None = None
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


class _NamedBatch(msgspec.Struct):
    ts: float
    events: list[_KvEvent]


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_KvEvent]
    data_parallel_rank: Any = None


@dataclass
class StoredRequest:
    """Blocks that followed one another. The first ``asked`` are of the prompt."""

    time_s: float
    blocks: list[int | str] = field(default_factory=list)
    asked: int = 0


@dataclass(frozen=True)
class StoredRequests:
    """All of a file."""

    block_tokens: int
    requests: list[StoredRequest]


def requests_of(lines: Iterable[tuple[str, bytes]]) -> StoredRequests:
    """lines: where each is, and the line. Raises ``FormatError``, which names the line."""
    named, arrays = msgspec.json.Decoder(_NamedBatch), msgspec.json.Decoder(_ArrayBatch)
    found: list[StoredRequest] = []
    ends: dict[int | str, StoredRequest] = {}  # by the last block
    block_tokens = 0
    for where, line in lines:
        try:
            batch = (arrays if line.lstrip()[:1] == b"[" else named).decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise FormatError(f"{where}: {error}") from error
        for event in batch.events:
            # A group's blocks cover the same tokens as those of the first one.
            of_others = event.medium not in _GPU or event.group_idx
            if event.type != "BlockStored" or of_others or not event.block_hashes:
                continue
            if event.block_size < 1 or block_tokens not in (0, event.block_size):
                raise FormatError(
                    f"{where}: a block of {event.block_size} tokens among others of {block_tokens}"
                )
            block_tokens = event.block_size
            _add(found, ends, batch.ts, event)
    if not found:
        raise FormatError("there is no BlockStored event of the GPU's cache")
    return StoredRequests(block_tokens, found)


def _add(
    found: list[StoredRequest], ends: dict[int | str, StoredRequest], time_s: float, event: _KvEvent
) -> None:
    parent = event.parent_block_hash
    request = None if parent is None else ends.pop(parent, None)
    if request is None or time_s - request.time_s > _SAME_REQUEST_S:
        request = StoredRequest(time_s)
        found.append(request)
    is_prompt = not request.blocks or len(event.block_hashes) > 1
    if is_prompt and request.asked == len(request.blocks):
        request.asked += len(event.block_hashes)
    request.blocks += event.block_hashes
    ends[event.block_hashes[-1]] = request
