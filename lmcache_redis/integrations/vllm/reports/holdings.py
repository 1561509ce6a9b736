# SPDX-License-Identifier: Apache-2.0
"""Which chunks are in which tier, and what routers have been told of their blocks.

Chunks of prompts that part inside a chunk share its leading blocks. Routers know blocks, so these
are counted: a block is told as stored with the first chunk that has it, and as removed with the
last. What is told follows from what is true at that moment: no event waits that could be outdated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored

# A tier, and the number of a group of layers.
Place = tuple[str, int]


class AnnouncedChunk(NamedTuple):
    """A chunk's number in the prompt, and vLLM's events for its parts by group, without a tier."""

    number: int
    parts: Sequence[BlockStored]


class Stored(NamedTuple):
    """A chunk is in a place now. Routers know its blocks before the one with number ``first``."""

    place: Place
    chunk: AnnouncedChunk
    first: int


@dataclass(slots=True)
class _Followed:
    """A chunk, the epoch of its name, which of its parts are where (bit masks).

    It has parts of each group of layers, and there of each rank that holds bytes of its own.
    told: where routers know it, since round number ``round``.
    """

    chunk: AnnouncedChunk
    epoch: bytes
    parts: dict[Place, int] = field(default_factory=dict)
    told: tuple[Place, ...] = ()
    round: int = 0

    def blocks(self, place: Place) -> Sequence[Any]:
        hashes: Sequence[Any] = self.chunk.parts[place[1]].block_hashes
        return hashes


class Holdings:
    """Follows up to ``limit`` chunks: those that were named last.

    Routers are told of a chunk in a tier, for a group, while the tier has all parts of that group,
    and the engine has the epoch in which the chunk was named. What is forgotten counts as removed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._epoch = b""
        self._chunks: OrderedDict[bytes, _Followed] = OrderedDict()
        self._groups: Sequence[int] = ()
        self._whole: dict[int, int] = {}  # the bit mask of all parts, by group
        self._round = 0  # in each, everything is told from the beginning
        self._told: dict[Place, dict[Any, int]] = {}  # of a block: how many chunks that were told
        self._gone: dict[Place, dict[Any, int]] = {}  # blocks to be told as removed
        self._due: dict[bytes, None] = {}  # chunks that may have to be told as stored

    @property
    def has_news(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._gone or self._due)

    def begin(self, groups: Sequence[int]) -> None:
        """Chunks have these parts, each of a group. Nothing is in any tier, as far as is known."""
        for followed in self._chunks.values():
            followed.parts.clear()
        self._groups = groups
        self._whole = {}
        for part, group in enumerate(groups):
            self._whole[group] = self._whole.get(group, 0) | 1 << part
        self.tell_again()
        self._due.clear()

    def begin_epoch(self, epoch: bytes) -> None:
        """Chunks of other epochs cannot be loaded, until the engine returns to theirs."""
        self._epoch = epoch
        self.tell_again()

    def forget(self) -> None:
        """Follows no chunk any more."""
        self._chunks.clear()
        self.tell_again()

    def tell_again(self) -> None:
        """Everything that was told is removed, and everything that is there is stored anew."""
        self._gone, self._told = self.told(), {}
        self._due = dict.fromkeys(self._chunks)
        self._round += 1

    def told(self) -> dict[Place, dict[Any, int]]:
        """The blocks that routers may know, by place: the keys."""
        told = dict(self._told)
        for place, blocks in self._gone.items():
            told[place] = {**told[place], **blocks} if place in told else blocks
        return told

    def follow(self, name: bytes, describe: Callable[[], AnnouncedChunk]) -> None:
        """Follows a chunk, for which the one that was named first may be forgotten."""
        if name in self._chunks:
            self._chunks.move_to_end(name)
            return
        self._chunks[name] = _Followed(describe(), self._epoch)
        if len(self._chunks) > self._limit:
            oldest, followed = self._chunks.popitem(last=False)
            self._due.pop(oldest, None)
            for place in followed.parts:
                self._untell(place, followed)

    def changed(self, part: int, tier: str, there: bool, name: bytes) -> None:
        """A tier has a part of a chunk now, or no longer."""
        followed = self._chunks.get(name)
        if followed is None or part >= len(self._groups):
            return
        place, bit = (tier, self._groups[part]), 1 << part
        before = followed.parts.get(place, 0)
        followed.parts[place] = before | bit if there else before & ~bit
        if not there:
            self._untell(place, followed)
        if self._untold(followed):
            self._due[name] = None
        else:
            self._due.pop(name, None)

    def take(self, limit: int) -> tuple[list[tuple[Place, list[Any]]], list[Stored]]:
        """What routers are told now: first all blocks removed, then up to ``limit`` chunks stored.

        Among the chunks of a place, one comes before those that follow it in a prompt.
        """
        removed = [(place, [*blocks]) for place, blocks in self._gone.items()]
        self._gone = {}
        taken: list[tuple[Place, _Followed]] = []
        done = []
        for name in self._due:
            followed = self._chunks[name]
            places = self._untold(followed)
            fitting = places[: limit - len(taken)]
            taken += [(place, followed) for place in fitting]
            if len(fitting) < len(places):
                break
            done.append(name)
        for name in done:
            del self._due[name]
        taken.sort(key=lambda each: (each[0], each[1].chunk.number))
        return removed, [stored for each in taken if (stored := self._tell(*each)) is not None]

    def _places(self, followed: _Followed) -> tuple[Place, ...]:
        return followed.told if followed.round == self._round else ()

    def _untold(self, followed: _Followed) -> list[Place]:
        """Where a chunk can be loaded from, and routers do not know it."""
        if followed.epoch != self._epoch:
            return []
        told, whole = self._places(followed), self._whole
        parts = followed.parts.items()
        return [place for place, mask in parts if mask == whole[place[1]] and place not in told]

    def _untell(self, place: Place, followed: _Followed) -> None:
        told = self._places(followed)
        if place not in told:
            return
        followed.told = tuple(each for each in told if each != place)
        chunks = self._told[place]
        for block in followed.blocks(place):
            chunks[block] -= 1
            if not chunks[block]:
                del chunks[block]
                self._gone.setdefault(place, {})[block] = 0

    def _tell(self, place: Place, followed: _Followed) -> Stored | None:
        followed.told, followed.round = (*self._places(followed), place), self._round
        chunks, blocks = self._told.setdefault(place, {}), followed.blocks(place)
        # Hashes are chained: a chunk that has a block also has those before it.
        first = next((n for n, block in enumerate(blocks) if block not in chunks), None)
        for block in blocks:
            chunks[block] = chunks.get(block, 0) + 1
        return None if first is None else Stored(place, followed.chunk, first)
