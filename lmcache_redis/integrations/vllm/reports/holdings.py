"""Which chunks are in which tier, and what routers have been told of their blocks.

Chunks of prompts that part inside a chunk share its leading blocks. Routers know blocks, so these
are counted: a block is told as stored with the first chunk that has it, and as removed with the
last. What is told follows from what is true at that moment: no event waits that could be outdated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
    """A chunk, the epoch of its name, which of its parts are where (bit masks), where it is told.

    It has parts of each group of layers, and there of each rank that holds bytes of its own.
    """

    chunk: AnnouncedChunk
    epoch: bytes
    parts: dict[Place, int] = field(default_factory=dict)
    told: tuple[Place, ...] = ()

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
        self._told: dict[Place, dict[Any, int]] = {}  # of a block: how many chunks that were told
        self._gone: dict[Place, dict[Any, None]] = {}  # blocks, to be told as removed
        self._due: dict[tuple[Place, bytes], None] = {}  # chunks, to be told as stored

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
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
        self._gone = self.told()
        self._told.clear()
        self._due.clear()
        for name, followed in self._chunks.items():
            followed.told = ()
            for place in followed.parts:
                self._look(place, name, followed)

    def told(self) -> dict[Place, dict[Any, None]]:
        """The blocks that routers may know, by place."""
        told = {place: dict.fromkeys(blocks) for place, blocks in self._told.items()}
        for place, blocks in self._gone.items():
            told.setdefault(place, {}).update(blocks)
        return told

    def follow(self, name: bytes, describe: Callable[[], AnnouncedChunk]) -> None:
        """Follows a chunk, for which the one that was named first may be forgotten."""
        if name in self._chunks:
            self._chunks.move_to_end(name)
            return
        self._chunks[name] = _Followed(describe(), self._epoch)
        if len(self._chunks) > self._limit:
            oldest, followed = self._chunks.popitem(last=False)
            for place in followed.parts:
                self._lost(place, oldest, followed)

    def changed(self, part: int, tier: str, there: bool, name: bytes) -> None:
        """A tier has a part of a chunk now, or no longer."""
        followed = self._chunks.get(name)
        if followed is None or part >= len(self._groups):
            return
        place, bit = (tier, self._groups[part]), 1 << part
        before = followed.parts.get(place, 0)
        followed.parts[place] = before | bit if there else before & ~bit
        self._look(place, name, followed)

    def take(self, limit: int) -> tuple[list[tuple[Place, list[Any]]], list[Stored]]:
        """What routers are told now: first all blocks removed, then up to ``limit`` chunks stored.

        Among the chunks of a place, one comes before those that follow it in a prompt.
        """
        removed = [(place, [*blocks]) for place, blocks in self._gone.items()]
        self._gone = {}
        taken = [(place, self._chunks[name]) for place, name in islice(self._due, limit)]
        for place, name in [*islice(self._due, limit)]:
            del self._due[place, name]
        taken.sort(key=lambda each: (each[0], each[1].chunk.number))
        return removed, [stored for each in taken if (stored := self._tell(*each)) is not None]

    def _look(self, place: Place, name: bytes, followed: _Followed) -> None:
        """Finds what is to be told of a chunk in a place."""
        whole = self._whole.get(place[1])
        if followed.epoch != self._epoch or followed.parts[place] != whole:
            self._lost(place, name, followed)
        elif place not in followed.told:
            self._due[place, name] = None

    def _lost(self, place: Place, name: bytes, followed: _Followed) -> None:
        self._due.pop((place, name), None)
        if place not in followed.told:
            return
        followed.told = tuple(each for each in followed.told if each != place)
        chunks = self._told[place]
        for block in followed.blocks(place):
            chunks[block] -= 1
            if not chunks[block]:
                del chunks[block]
                self._gone.setdefault(place, {})[block] = None

    def _tell(self, place: Place, followed: _Followed) -> Stored | None:
        followed.told += (place,)
        chunks, blocks = self._told.setdefault(place, {}), followed.blocks(place)
        # Hashes are chained: a chunk that has a block also has those before it.
        first = next((n for n, block in enumerate(blocks) if block not in chunks), None)
        for block in blocks:
            chunks[block] = chunks.get(block, 0) + 1
        return None if first is None else Stored(place, followed.chunk, first)
