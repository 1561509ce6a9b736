"""KV events: vLLM publishes to routers which chunks can be loaded, with its own block hashes.

Source: ``vllm/distributed/kv_events.py`` and ``KVConnectorBase_V1.take_events``. vLLM takes the
events of the connector in its scheduler, once a step, and publishes them with its own. So they come
from here and not from the workers (``get_kv_connector_kv_cache_events``): only the agent knows what
it has, it tells the scheduler (`ChunkWatch`), and the scheduler knows the requests' tokens.

A chunk is described when a request names it, because an event has the tokens of its blocks. Of
chunks that no request of this engine has named, there are no events.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace
from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

from lmcache_redis.client.scheduler import ChunkWatch
from lmcache_redis.integrations.vllm.guard import EVENTS, guarded, nothing

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored, KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_redis.integrations.vllm.support import LayerGroup

# A chunk of 256 tokens takes 2 KB here, with 16 hashes.
MAX_CHUNKS = 1 << 15
# They take about 1 ms, and the step of the scheduler waits.
CHUNKS_PER_STEP = 128

# vLLM's medium, and its locality relative to the engine.
_PLACES = {
    "host": (kv_events.MEDIUM_CPU, "LOCAL"),
    "disk": (kv_events.MEDIUM_STORAGE, "LOCAL"),
    "redis": (kv_events.MEDIUM_STORAGE, "REMOTE"),
}


class AnnouncedChunk(NamedTuple):
    """A chunk's number in the prompt, and vLLM's events for its parts by group, without a tier."""

    number: int
    parts: Sequence[BlockStored]


class Event(NamedTuple):
    """A chunk is in a tier now, for a group, or no longer (``stored``)."""

    stored: bool
    tier: str
    group: int
    chunk: AnnouncedChunk


# Which parts of a chunk are where: bit masks, by tier and group.
_Parts = dict[tuple[str, int], int]


class Holdings:
    """Which chunks are in which tier, of up to ``limit`` chunks: those that were named last.

    A chunk has parts: of each group of layers one, and of each rank that holds bytes of its own. It
    is in a tier, for a group, while the tier has all parts of that group. An event follows when it
    enters or leaves a tier. What is forgotten counts as removed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: OrderedDict[bytes, tuple[AnnouncedChunk, _Parts]] = OrderedDict()
        self._groups: Sequence[int] = ()
        self._whole: dict[int, int] = {}  # the bit mask of all parts, by group

    def begin(self, groups: Sequence[int]) -> list[Event]:
        """Chunks have these parts, each of a group. Nothing is in any tier, as far as is known."""
        events = [event for held in self._chunks.values() for event in self._removals(*held)]
        for _, parts in self._chunks.values():
            parts.clear()
        self._groups = groups
        self._whole = {}
        for part, group in enumerate(groups):
            self._whole[group] = self._whole.get(group, 0) | 1 << part
        return events

    def follow(self, name: bytes, describe: Callable[[], AnnouncedChunk]) -> list[Event]:
        """Follows a chunk, for which the one that was named first may be forgotten."""
        if name in self._chunks:
            self._chunks.move_to_end(name)
            return []
        self._chunks[name] = (describe(), {})
        if len(self._chunks) <= self._limit:
            return []
        return self._removals(*self._chunks.popitem(last=False)[1])

    def changed(self, part: int, tier: str, there: bool, name: bytes) -> Event | None:
        """What follows from a change of one part."""
        if name not in self._chunks or part >= len(self._groups):
            return None
        chunk, parts = self._chunks[name]
        group = self._groups[part]
        before = parts.get((tier, group), 0)
        after = before | 1 << part if there else before & ~(1 << part)
        parts[tier, group] = after
        whole = self._whole[group]
        if (before == whole) == (after == whole):
            return None
        return Event(after == whole, tier, group, chunk)

    def forget(self) -> list[Event]:
        """Follows no chunk any more."""
        events = self.begin(self._groups)
        self._chunks.clear()
        return events

    def _removals(self, chunk: AnnouncedChunk, parts: _Parts) -> list[Event]:
        return [
            Event(False, tier, group, chunk)
            for (tier, group), mask in parts.items()
            if mask == self._whole[group]
        ]


def in_order(events: Iterable[Event]) -> list[list[Event]]:
    """Runs of one kind, tier and group. In a run, a chunk comes before those that follow it."""
    runs = groupby(events, key=lambda each: (each.stored, each.tier, each.group))
    return [sorted(run, key=lambda each: each.chunk.number) for _, run in runs]


class Announcer:
    """Turns the agent's news into events. A failure ends the events, never the cache.

    hash_tokens: tokens that one hash of vLLM covers. specs: by vLLM's number of a group, its fields
    in events of stored blocks, see `spec_fields`.
    """

    def __init__(
        self,
        watch: ChunkWatch,
        groups: Sequence[LayerGroup],
        hash_tokens: int,
        specs: Sequence[Mapping[str, Any]],
    ) -> None:
        self._watch = watch
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._specs = specs
        self._holdings = Holdings(MAX_CHUNKS)
        self._events: list[Event] = []
        self._failed_reports: set[str] = set()

    @property
    def has_events(self) -> bool:
        """Whether `take` may return events now."""
        return not self._failed_reports and (bool(self._events) or self._watch.has_news)

    @guarded(nothing, EVENTS)
    def named(
        self, request: Request, names: Sequence[bytes], chunks: range, chunk_tokens: int
    ) -> None:
        """A request asks for chunks, or stores them. names: of all its chunks."""
        for number in chunks:
            describe = partial(self._described, request, number, chunk_tokens)
            self._events += self._holdings.follow(names[number], describe)

    @guarded(nothing, EVENTS)
    def forget(self) -> None:
        """The chunks so far can no longer be loaded."""
        self._events += self._holdings.forget()

    @guarded(lambda self: [], EVENTS)
    def take(self) -> list[KVCacheEvent]:
        """The events since the last call; of many, the first ones."""
        if (news := self._watch.take()) is not None:
            if news.lost:
                self._events += self._holdings.begin(self._watch.groups)
            for change in news.changes:
                place = (change.part, change.tier_name, change.there)
                changed = (self._holdings.changed(*place, each) for each in change.hashes)
                self._events += [event for event in changed if event is not None]
        events = self._events[:CHUNKS_PER_STEP]
        del self._events[:CHUNKS_PER_STEP]
        return [each for run in in_order(events) for each in self._published(run)]

    def _described(self, request: Request, number: int, chunk_tokens: int) -> AnnouncedChunk:
        parts = [self._part(request, group, number, chunk_tokens) for group in self._groups]
        return AnnouncedChunk(number, parts)

    def _part(
        self, request: Request, group: LayerGroup, number: int, chunk_tokens: int
    ) -> BlockStored:
        blocks, size = group.part(number, chunk_tokens), group.block_size_tokens
        ends = [block * size // self._hash_tokens for block in range(blocks.start, blocks.stop + 1)]
        parent, *hashes = [
            kv_cache_utils.maybe_convert_block_hash(request.block_hashes[end - 1]) if end else None
            for end in ends
        ]
        keys, feature = [], 0
        for begin in range(blocks.start * size, blocks.stop * size, size):
            each, feature = kv_cache_utils.generate_block_hash_extra_keys(
                request, begin, begin + size, feature
            )
            keys.append(each)
        # Newer versions of vLLM tag the keys that they hash.
        published = getattr(kv_cache_utils, "to_event_extra_keys", list)(keys)
        lora = request.lora_request
        tokens: Any = array("i", request.all_token_ids[blocks.start * size : blocks.stop * size])
        return kv_events.BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=None,
            lora_name=lora.name if lora else None,
            extra_keys=published,
            group_idx=group.number,
            **self._specs[group.number],
        )

    def _published(self, run: Sequence[Event]) -> list[KVCacheEvent]:
        """vLLM's events for a run: of stored chunks one each, of removed ones one for all."""
        stored, tier, number, _ = run[0]
        medium, locality = _PLACES[tier]
        parts = [each.chunk.parts[number] for each in run]
        if stored:
            return [
                replace(part, token_ids=list(part.token_ids), medium=medium, locality=locality)
                for part in parts
            ]
        gone = [each for part in parts for each in part.block_hashes]
        group = self._groups[number].number
        return [
            kv_events.BlockRemoved(
                block_hashes=gone, medium=medium, group_idx=group, locality=locality
            )
        ]


def spec_fields(kv_cache_config: KVCacheConfig) -> list[Mapping[str, Any]]:
    """What vLLM's own events say of the layers of each group."""
    from vllm.v1 import kv_cache_interface

    kind_of = kv_cache_interface.get_kv_cache_spec_kind
    window_of = kv_cache_interface.get_kv_cache_spec_sliding_window
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        {"kv_cache_spec_kind": kind_of(each).value, "kv_cache_spec_sliding_window": window_of(each)}
        for each in specs
    ]
