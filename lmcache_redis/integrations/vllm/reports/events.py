# SPDX-License-Identifier: Apache-2.0
"""KV events: vLLM publishes to routers which chunks can be loaded, with its own block hashes.

Source: ``vllm/distributed/kv_events.py`` and ``KVConnectorBase_V1.take_events``. vLLM takes the
events of the connector in its scheduler, once a step, and publishes them with its own. So they come
from here and not from the workers (``get_kv_connector_kv_cache_events``): only the agent knows what
it has, it tells the scheduler (`ChunkWatch`), and the scheduler knows the requests' tokens.

A chunk is described when a request names it, because an event has the tokens of its blocks. Of
chunks that no request of this engine has named, there are no events.

`holdings` decides what is told. vLLM takes the connector's events after those of its own cache, so
that what follows from a reset comes behind its ``AllBlocksCleared``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

from lmcache_redis.client.scheduler import ChunkWatch
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.guard import EVENTS, guarded, nothing
from lmcache_redis.integrations.vllm.reports.holdings import (
    AnnouncedChunk,
    Holdings,
    Place,
    Stored,
)
from lmcache_redis.tier_kinds import KINDS, Medium

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored, KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_redis.integrations.vllm.support import LayerGroup

# A chunk of 256 tokens takes 2 KB here, with 16 hashes.
MAX_CHUNKS = 1 << 15
# Stored ones: they take about 1 ms, and the step of the scheduler waits.
CHUNKS_PER_STEP = 128

_MEDIA = {Medium.MEMORY: kv_events.MEDIUM_CPU, Medium.STORAGE: kv_events.MEDIUM_STORAGE}
# vLLM's medium, and its locality relative to the engine.
_PLACES = {
    kind.name: (_MEDIA[kind.medium], "REMOTE" if kind.is_shared else "LOCAL") for kind in KINDS
}


class Announcer:
    """Turns the agent's news into events. A failure ends the events, never the cache.

    hash_tokens: tokens that one hash of vLLM covers. specs: by vLLM's number of a group, its fields
    in events of stored blocks, see `spec_fields`. is_paused: whether vLLM is paused.
    """

    def __init__(
        self,
        watch: ChunkWatch,
        groups: Sequence[LayerGroup],
        hash_tokens: int,
        specs: Sequence[Mapping[str, Any]],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._watch = watch
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._specs = specs
        self._is_paused = is_paused
        self._holdings = Holdings(MAX_CHUNKS)
        self._chunk_tokens = 0
        self._failed_reports: set[str] = set()

    @property
    def has_events(self) -> bool:
        """Whether vLLM should step for events. While it is paused they wait, as its own do."""
        if EVENTS in self._failed_reports or self._is_paused():
            return False
        return self._holdings.has_news or self._watch.has_news

    @guarded(nothing, EVENTS)
    def named(
        self, request: Request, names: Sequence[bytes], chunks: range, chunk_tokens: int
    ) -> None:
        """A request asks for chunks, or stores them. names: of all its chunks."""
        if chunk_tokens != self._chunk_tokens:  # an agent with another one was started
            self._chunk_tokens = chunk_tokens
            self._holdings.forget()
        for number in chunks:
            describe = partial(self._described, request, number, chunk_tokens)
            self._holdings.follow(names[number], describe)

    @guarded(nothing, EVENTS)
    def begin_epoch(self, epoch: bytes) -> None:
        """From now on requests name their chunks with this epoch; they may have done so before."""
        self._holdings.begin_epoch(epoch)

    @guarded(nothing, EVENTS)
    def tell_again(self) -> None:
        """vLLM resets its prefix cache: some routers then forget every tier of this engine."""
        self._holdings.tell_again()

    @guarded(nothing, EVENTS)
    def forget(self) -> None:
        """Nothing can be loaded any more."""
        self._holdings.forget()

    @guarded(lambda self: self._last_events(), EVENTS)
    def take(self) -> list[KVCacheEvent]:
        """The events since the last call; of many stored chunks, the first ones."""
        if (news := self._watch.take()) is not None:
            if news.lost:
                self._holdings.begin(self._watch.groups)
            for change in news.changes:
                for name in change.hashes:
                    self._holdings.changed(change.part, change.tier_name, change.there, name)
        removed, stored = self._holdings.take(CHUNKS_PER_STEP)
        return [self._removed(*each) for each in removed] + [self._stored(each) for each in stored]

    @guarded(lambda self: [], "the end of KV events")
    def _last_events(self) -> list[KVCacheEvent]:
        """After a failure nothing would correct what was told: it is removed."""
        told, self._holdings = self._holdings.told(), Holdings(0)
        return [self._removed(place, [*blocks]) for place, blocks in told.items()]

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
        published = needs.EVENT_KEYS.of(kv_cache_utils)(keys)
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

    def _stored(self, stored: Stored) -> KVCacheEvent:
        (tier, group), first = stored.place, stored.first
        medium, locality = _PLACES[tier]
        part = stored.chunk.parts[group]
        hashes, keys = part.block_hashes, part.extra_keys
        return replace(
            part,
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else part.parent_block_hash,
            token_ids=list(part.token_ids[first * part.block_size :]),
            extra_keys=keys[first:] if keys else keys,
            medium=medium,
            locality=locality,
        )

    def _removed(self, place: Place, blocks: list[Any]) -> KVCacheEvent:
        tier, group = place
        medium, locality = _PLACES[tier]
        return kv_events.BlockRemoved(
            block_hashes=blocks,
            medium=medium,
            group_idx=self._groups[group].number,
            locality=locality,
        )


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
