# SPDX-License-Identifier: Apache-2.0
"""Traces: the requests of an engine, as columns.

A request has blocks. The first ``asked`` of them are of its prompt and are looked up; the others
were generated, and are only stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_redis.chunks.names import Reach
from lmcache_redis.errors import ConfigError, FormatError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BlockLayout:
    """The size of each block: in the host pool, and of its parts, by what prefixes need of them."""

    block_tokens: int
    pool_bytes: int
    part_bytes: Mapping[Reach, int]

    @property
    def nbytes(self) -> int:
        return sum(self.part_bytes.values())

    def times(self, blocks: int) -> BlockLayout:
        """The layout of chunks of this number of blocks."""
        part_bytes = {reach: nbytes * blocks for reach, nbytes in self.part_bytes.items()}
        return BlockLayout(self.block_tokens * blocks, self.pool_bytes * blocks, part_bytes)


@dataclass(frozen=True)
class Trace:
    """Requests to one model, in the order of their times.

    starts: where each request's blocks begin in ``ids``; one more than there are requests. ids:
    equal for equal prefixes only, from 0 on. tokens: of the prompt. first: the number in the prompt
    of the first block. token_s: of the engine; 0: not known. measured: the hit rates of the agent
    that recorded it, named as in a row of a plan.
    """

    times_s: Floats
    tokens: Ints
    asked: Ints
    first: Ints
    starts: Ints
    ids: Ints
    layout: BlockLayout
    has_times: bool = True
    token_s: float = 0.0
    measured: Mapping[str, float] | None = None
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def request_of(self) -> Ints:
        """The request of each block."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def within(self) -> Ints:
        """The place of each block in its request."""
        return np.arange(len(self.ids)) - self.starts[self.request_of]

    @property
    def duration_s(self) -> float:
        """0.0 if it is not known."""
        return float(self.times_s[-1] - self.times_s[0]) if self.has_times else 0.0

    def in_chunks(self, chunk_tokens: int) -> Trace:
        """The trace with chunks in place of blocks: each is named by its last block.

        Raises ``ConfigError`` if chunks of that size do not consist of whole blocks.
        """
        per_chunk, rest = divmod(chunk_tokens, self.layout.block_tokens)
        if rest:
            raise ConfigError(
                f"--chunk-size-tokens {chunk_tokens}: the trace has blocks of "
                f"{self.layout.block_tokens} tokens: give a multiple of that"
            )
        if per_chunk == 1:
            return self
        request, within = self.request_of, self.within
        is_last = (within + self.first[request] + 1) % per_chunk == 0
        is_asked = is_last & (within < self.asked[request])
        counts = np.bincount(request[is_last], minlength=len(self))
        return replace(
            self,
            asked=np.bincount(request[is_asked], minlength=len(self)),
            first=self.first // per_chunk,
            starts=np.concatenate([[0], np.cumsum(counts)]),
            ids=_dense(self.ids[is_last]),
            layout=self.layout.times(per_chunk),
        )


def prefix_numbers(
    known: dict[tuple[int, int | str], int], blocks: Iterable[int | str]
) -> Iterator[int]:
    """One for each block, equal if the block and all before it are. known: those given before."""
    number = -1
    for block in blocks:
        number = known.setdefault((number, block), len(known))
        yield number


class TraceColumns:
    """A trace while it is read. Requests may come in any order."""

    def __init__(self) -> None:
        self.times = array("d")
        self.asked, self.first, self.tokens = array("q"), array("q"), array("q")
        self.starts = array("q", [0])
        self.ids = array("q")

    def add(
        self, time_s: float, ids: Iterable[int], asked: int = 0, first: int = 0, tokens: int = 0
    ) -> None:
        """Adds a request. ids: equal for equal prefixes only. tokens: if some follow its blocks."""
        self.times.append(time_s)
        self.asked.append(asked)
        self.first.append(first)
        self.tokens.append(tokens)
        self.ids.extend(ids)
        self.starts.append(len(self.ids))

    def trace(self, layout: BlockLayout | None, **more: Any) -> Trace:
        """All of them, in order. Raises ``FormatError`` if there are none."""
        if layout is None or not len(self.times) or not len(self.ids):
            raise FormatError("the trace has no request with a whole block")
        times = np.frombuffer(self.times)
        starts, ids = np.frombuffer(self.starts, np.int64), np.frombuffer(self.ids, np.int64)
        order = np.argsort(times, kind="stable")
        counts = np.diff(starts)[order]
        new = np.concatenate([[0], np.cumsum(counts)])
        ids = ids[np.arange(new[-1]) + np.repeat(starts[:-1][order] - new[:-1], counts)]
        asked, first, tokens = (
            np.frombuffer(column, np.int64)[order]
            for column in (self.asked, self.first, self.tokens)
        )
        tokens = np.maximum(tokens, asked * layout.block_tokens)
        return Trace(times[order], tokens, asked, first, new, _dense(ids), layout, **more)


def _dense(ids: Ints) -> Ints:
    """The same, numbered from 0."""
    return np.unique(ids, return_inverse=True)[1].astype(np.int64).reshape(-1)
