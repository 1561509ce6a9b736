# SPDX-License-Identifier: Apache-2.0
"""Which engines of an agent share their KV, and which pairs keep those of one model apart.

Two engines share if their layouts are equal: those of all ranks and groups of layers, or of those
that one of them has registered here, if its other ranks are elsewhere. Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.agent.peers import Peer
from lmcache_redis.chunks.keys import held_ranks
from lmcache_redis.device.layout import KVLayout, named_pairs
from lmcache_redis.errors import FormatError


@dataclass(eq=False)
class _Engines:
    """One engine, or several that share.

    layouts: by fingerprint, in the order of ranks and groups. shares: of parts with the first.
    """

    model: str
    chunk_tokens: int
    layouts: dict[bytes, KVLayout] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    shares: set[int] = field(default_factory=set)

    def add(self, worker: Peer) -> None:
        registration = worker.registration
        assert registration is not None
        if not self.ids:
            self.ids.append(worker.engine_id)
        for form, layout in zip(registration.forms, registration.device.layouts, strict=True):
            self.layouts.setdefault(form.fingerprint, layout)
            if form.fingerprint == next(iter(self.layouts)):
                self.shares.update(held_ranks(form.kv_rank))

    def has(self, other: _Engines) -> bool:
        return self.model == other.model and other.layouts.keys() <= self.layouts.keys()

    def join(self, other: _Engines) -> None:
        self.ids += other.ids
        self.shares |= other.shares

    def pairs_that_differ(self, other: _Engines) -> list[str]:
        """What differs between layouts with the same place."""
        found: dict[str, None] = {}
        rows = zip(self.layouts.items(), other.layouts.items(), strict=False)
        for (fingerprint, layout), (theirs, their_layout) in rows:
            if fingerprint != theirs:
                ours = _pairs(layout, self.chunk_tokens)
                others = _pairs(their_layout, other.chunk_tokens)
                names = [*ours, *(name for name in others if name not in ours)]
                found |= dict.fromkeys(n for n in names if ours.get(n) != others.get(n))
        return [*found]


def sharing(workers: Iterable[Peer]) -> list[dict[str, Any]]:
    """For STATUS: of each model, the engines that share, the most of them first.

    apart: the pairs that keep these from the first ones of their model. workers: registered ones.
    """
    engines: dict[object, _Engines] = {}
    for worker in sorted(workers, key=lambda each: each.hello.worker_id or 0):
        hello, registration = worker.hello, worker.registration
        assert registration is not None
        # Each process of an unnamed engine has an id of its own.
        name = (hello.model_name, hello.world_size) if hello.unnamed else worker.engine_id
        new = _Engines(hello.model_name, registration.chunk_tokens)
        engines.setdefault(name, new).add(worker)
    circles: list[_Engines] = []
    for engine in sorted(engines.values(), key=lambda each: -len(each.layouts)):
        circle = next((each for each in circles if each.has(engine)), None)
        if circle is None:
            circles.append(engine)
        else:
            circle.join(engine)
    circles.sort(key=lambda each: -len(each.ids))
    first: dict[str, _Engines] = {}
    return [_row(each, first.setdefault(each.model, each)) for each in circles]


def _row(engines: _Engines, first: _Engines) -> dict[str, Any]:
    return {
        "model": engines.model,
        "layouts": [each.hex() for each in engines.layouts],
        "engines": engines.ids,
        "shares": len(engines.shares),
        "apart": first.pairs_that_differ(engines),
    }


def _pairs(layout: KVLayout, chunk_tokens: int) -> Mapping[str, str]:
    with contextlib.suppress(FormatError):  # it holds what cannot be printed
        return named_pairs(layout.canonical(chunk_tokens))
    return {}
