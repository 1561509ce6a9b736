"""A trace from vLLM's KV events, one batch a line as its publisher's msgpack decodes to.

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

from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_redis.errors import FormatError
from lmcache_redis.plan.traces import Trace, TraceColumns, uniform_blocks

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


class KvEventBatch(msgspec.Struct, array_like=True):
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


class KvEvents:
    """The events of a trace while it is read."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._block_tokens = 0
        self._requests: list[_StoredRequest] = []
        self._ends: dict[int | str, _StoredRequest] = {}  # by the last block

    def add(self, batch: KvEventBatch) -> None:
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
            tokens = each.asked * self._block_tokens
            columns.add(each.time_s, ids, tokens=tokens, asked=each.asked)
        layout = uniform_blocks(self._block_tokens, self._token_bytes)
        note = (
            "KV events do not tell what the engine's own cache has served: hits are of what it had "
            "not"
        )
        return columns.trace([layout], notes=(note,))
