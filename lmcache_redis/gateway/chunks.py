"""What connections do with the cache: receive a chunk into it, load one, list the keys.

A PUT is received into the memory of its future entry, as far as its share of the budget reaches.
A load takes its share before it takes memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from lmcache_redis.cache.objects import Held, ObjectCache
from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.budget import Share
from lmcache_redis.gateway.shared import Shared
from lmcache_redis.gateway.wire import key_text_of, reply_of
from lmcache_redis.keys import ObjectKey
from lmcache_redis.lm_wire import MEMORY_LOCATION
from lmcache_redis.protocol import RemoteMetadata

# For one question to the tiers, or one load.
_TIER_TIMEOUT_S = 5.0
_LIST_TIMEOUT_S = 60.0
_DISK_TIER = "disk"
# Receives payloads that are not stored.
_DROPPED = memoryview(bytearray(256 << 10))

_Answer = TypeVar("_Answer")


class Receiving:
    """Room for the payload of a PUT. It ends with `publish` or `abandon`.

    metadata: None if the payload is to be received and dropped. It is also dropped if the cache
    has no memory for it. Memory is reserved with the first grant, on the loop's thread: a recycled
    block, or a fresh one if too many recycled ones wait for their bytes.
    """

    def __init__(self, shared: Shared, metadata: RemoteMetadata | None) -> None:
        self._shared = shared
        self._metadata = metadata
        self._nbytes = metadata.length if metadata is not None else 0
        self._share = shared.budget.empty()
        self._held: Held | None = None
        self._reused: Share | None = None

    def try_next(self, rest: int) -> Sequence[memoryview]:
        if self._metadata is None:
            return [_DROPPED[:rest]]
        return self._views(self._metadata, self._share.try_extend(rest), rest)

    async def next(self, rest: int) -> Sequence[memoryview]:
        if self._metadata is None:
            return [_DROPPED[:rest]]
        return self._views(self._metadata, await self._share.extend(rest), rest)

    def publish(self, key: ObjectKey) -> asyncio.Future[None]:
        """Makes the chunk visible to GETs. The future is done when every tier has answered."""
        shared, held, nbytes = self._shared, self._held, self._nbytes
        if self._reused is not None:
            self._reused.release()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def written(stored: bool) -> None:
            self._share.release()
            if not ended.done():
                ended.set_result(None)
            if stored:
                shared.counters.stored += 1
                return
            shared.counters.not_stored += 1
            shared.log.warning(
                "not stored", "a chunk of %d bytes is not stored: no tier took it", nbytes
            )

        if held is None:
            written(False)
            return ended
        try:
            shared.cache.publish(key, held, written)
        except FormatError:  # the tiers have no encoding for it
            shared.cache.abandon(held)
            written(False)
        return ended

    def abandon(self) -> None:
        """Releases everything: the payload was not received completely."""
        if self._held is not None:
            self._shared.cache.abandon(self._held)
        if self._reused is not None:
            self._reused.release()
        self._share.release()

    def _views(self, metadata: RemoteMetadata, covered: int, rest: int) -> Sequence[memoryview]:
        if not covered:
            return []
        if rest == metadata.length:
            self._reused = self._shared.reused.try_take(rest)
            self._held = self._shared.cache.reserve(metadata, fresh=self._reused is None)
        if self._held is None:
            self._metadata = None
            self._share.release()
            return [_DROPPED[:rest]]
        at = metadata.length - rest
        return [self._held.payload[at : at + covered]]


def reply_to(metadata: RemoteMetadata, most_bytes: int) -> bytes | None:
    """The header of a reply; None for a chunk that this protocol cannot deliver: a miss."""
    try:
        return reply_of(metadata) if metadata.length <= most_bytes else None
    except FormatError:
        return None  # a chunk of another protocol


class Places(NamedTuple):
    """Where to look for a chunk: in memory, and in the tiers from number `first` to `end` - 1."""

    memory: bool = True
    first: int = 0
    end: int | None = None


def places_of(shared: Shared, location: str | None) -> Places:
    """The places that the location of a request means. Raises FormatError for a missing tier."""
    if location is None:
        return Places()
    if location == MEMORY_LOCATION and shared.memory_bytes:
        return Places(end=0)
    names = [tier.name for tier in shared.cache.cache.tiers]
    if location == MEMORY_LOCATION or _DISK_TIER not in names:
        raise FormatError(f"the location {location} is a tier that this gateway does not have")
    level = names.index(_DISK_TIER)
    return Places(memory=False, first=level, end=level + 1)


async def load(shared: Shared, key: ObjectKey, places: Places) -> tuple[Held, Share] | None:
    """A chunk from the first tier that delivers it, and its share. The caller releases both."""
    cache, first = shared.cache, places.first
    while True:
        found = await _ask(partial(cache.find, key, _deadline(), first=first, end=places.end))
        if found is None or reply_to(found.metadata, shared.max_payload_bytes) is None:
            return None
        share = await shared.budget.take(found.metadata.length)
        held: Held | None = None
        try:
            held = await _ask(partial(cache.load, key, found, _deadline()), partial(_drop, cache))
        finally:
            if held is None:
                share.release()
        if held is not None:
            return held, share
        first = found.level + 1


async def contains(cache: ObjectCache, key: ObjectKey, places: Places) -> bool:
    """Whether a GET would most likely find the chunk."""
    if places == Places():
        return await _ask(partial(cache.contains, key, _deadline()))
    if places.memory:
        return cache.in_memory(key)
    find = partial(cache.find, key, _deadline(), first=places.first, end=places.end)
    return await _ask(find) is not None


async def listed(cache: ObjectCache) -> bytes:
    """The key texts of all chunks that a GET can name, one a line."""
    keys = await _ask(partial(cache.keys, _deadline(_LIST_TIMEOUT_S)))
    return await asyncio.to_thread(_text_of, keys)  # there may be millions


async def _ask(
    begin: Callable[[Callable[[_Answer], None]], None],
    unwanted: Callable[[_Answer], None] = lambda _: None,
) -> _Answer:
    """The result of an asynchronous call to the cache.

    begin: the call without its `done`. unwanted: gets the result if the task is cancelled first.
    """
    answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

    def done(result: _Answer) -> None:
        if answer.cancelled():
            unwanted(result)
        else:
            answer.set_result(result)

    begin(done)
    try:
        return await answer
    except asyncio.CancelledError:
        if not answer.cancelled():
            unwanted(answer.result())
        raise


def _drop(cache: ObjectCache, held: Held | None) -> None:
    if held is not None:
        cache.release(held)


def _deadline(timeout_s: float = _TIER_TIMEOUT_S) -> float:
    return time.monotonic() + timeout_s


def _text_of(keys: Sequence[ObjectKey]) -> bytes:
    texts = []
    for key in keys:
        with contextlib.suppress(FormatError):
            texts.append(key_text_of(key))
    return "\n".join(texts).encode("utf-8")
