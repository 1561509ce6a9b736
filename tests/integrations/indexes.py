# SPDX-License-Identifier: Apache-2.0
"""Indexes as routers keep them, of the blocks in each place. All are told the same events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_events import BlockRemoved, BlockStored

# Medium, locality, group.
Place = tuple["str | None", "str | None", "int | None"]


class Index:
    """counts: a block is there until it was removed as often as stored.
    clears_all: ``AllBlocksCleared`` is about every place, not only about vLLM's own cache.
    """

    def __init__(self, counts: bool, clears_all: bool) -> None:
        self._counts = counts
        self._clears_all = clears_all
        self._blocks: Counter[tuple[Place, Any]] = Counter()

    def take(self, event: Any) -> None:
        if isinstance(event, BlockStored | BlockRemoved):
            place = (event.medium, event.locality, event.group_idx)
            for each in event.block_hashes:
                before = self._blocks[place, each] if self._counts else 0
                step = 1 if isinstance(event, BlockStored) else -1
                self._blocks[place, each] = max(0, before + step)
        else:
            for place, each in [*self._blocks]:
                if self._clears_all or place[0] == "GPU":
                    del self._blocks[place, each]

    def there(self) -> dict[Place, set[Any]]:
        """The blocks in the connector's places."""
        found: dict[Place, set[Any]] = {}
        for place, block in +self._blocks:
            if place[0] != "GPU":
                found.setdefault(place, set()).add(block)
        return found


class Indexes:
    """One of each kind."""

    def __init__(self) -> None:
        self._all = [Index(*kind) for kind in product((False, True), repeat=2)]

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            for index in self._all:
                index.take(event)

    def there(self) -> dict[Place, set[Any]]:
        """What they have of the connector's places: the same in all of them."""
        first, *others = [index.there() for index in self._all]
        assert all(other == first for other in others)
        return first
