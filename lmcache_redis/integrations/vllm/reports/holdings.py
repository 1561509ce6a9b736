"""Which chunks of an engine's requests are in which tier: what follows from the agent's changes.

A chunk has parts: of each group of layers one, and of each rank that holds bytes of its own. It is
in a tier, for a group, while the tier has all parts of that group. The agent may tell of one change
again, and tells of chunks of other engines, which are unknown here.

An event follows when a chunk enters or leaves a tier. What is forgotten counts as removed, so that
no router relies on what is no longer followed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

_C = TypeVar("_C")


class Event(NamedTuple, Generic[_C]):
    """A chunk is in a tier now, for a group, or no longer (``stored``)."""

    stored: bool
    tier: str
    group: int
    chunk: _C


class _Held(Generic[_C]):
    __slots__ = ("chunk", "parts")

    def __init__(self, chunk: _C) -> None:
        self.chunk = chunk
        self.parts: dict[tuple[str, int], int] = {}  # bit masks, by tier and group


class Holdings(Generic[_C]):
    """Remembers up to ``limit`` chunks, those that were named last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: OrderedDict[bytes, _Held[_C]] = OrderedDict()
        self._groups: Sequence[int] = ()
        self._whole: dict[int, int] = {}  # the bit mask of all parts, by group

    def __contains__(self, name: bytes) -> bool:
        return name in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def begin(self, groups: Sequence[int]) -> list[Event[_C]]:
        """Chunks have these parts, each of a group. Nothing is in any tier, as far as is known."""
        events = self.forget_tiers()
        self._groups = groups
        self._whole = {}
        for part, group in enumerate(groups):
            self._whole[group] = self._whole.get(group, 0) | 1 << part
        return events

    def remember(self, name: bytes, chunk: _C) -> list[Event[_C]]:
        """Follows a chunk. Others may be forgotten for it."""
        held = self._chunks.get(name)
        if held is not None:
            self._chunks.move_to_end(name)
            return []
        self._chunks[name] = _Held(chunk)
        events: list[Event[_C]] = []
        while len(self._chunks) > self._limit:
            events += self._removals(self._chunks.popitem(last=False)[1])
        return events

    def changed(self, part: int, tier: str, there: bool, name: bytes) -> Event[_C] | None:
        """What follows from a change of one part."""
        held = self._chunks.get(name)
        if held is None or part >= len(self._groups):
            return None
        group = self._groups[part]
        before = held.parts.get((tier, group), 0)
        after = before | 1 << part if there else before & ~(1 << part)
        held.parts[tier, group] = after
        whole = self._whole[group]
        if (before == whole) == (after == whole):
            return None
        return Event(after == whole, tier, group, held.chunk)

    def forget_tiers(self) -> list[Event[_C]]:
        """Nothing is known of the tiers any more; the chunks are still followed."""
        events = [event for held in self._chunks.values() for event in self._removals(held)]
        for held in self._chunks.values():
            held.parts.clear()
        return events

    def forget(self) -> list[Event[_C]]:
        """Follows no chunk any more."""
        events = self.forget_tiers()
        self._chunks.clear()
        return events

    def _removals(self, held: _Held[_C]) -> list[Event[_C]]:
        return [
            Event(False, tier, group, held.chunk)
            for (tier, group), mask in held.parts.items()
            if mask == self._whole[group]
        ]
