# SPDX-License-Identifier: Apache-2.0
"""Answers WHY and LAYOUTS: why a request missed, and why two engines do not share.

What a lookup found is kept (`history`). Where its first missed chunk is now, and whether other
layouts have it, is asked when somebody wants to know.

A key names a layout by its fingerprint alone. So each agent writes to Redis what the fingerprints
of its engines are made of, one small value for each, named and framed as a chunk is:

    namespace of `DESCRIPTIONS` | ObjectKey(fingerprint, model, kv_rank)     KVLayout.canonical

It is sealed, evicted, expired and purged as chunks are, and written every minute, while a worker
with the layout is registered: Redis may have been down or emptied, and may evict or expire what
is not read. The fingerprint is its digest, so a wrong description is not believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.peers import Registration, Reply
from lmcache_redis.agent.reports import words
from lmcache_redis.cache.threads import posting
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import DESCRIPTIONS, ChunkNames, PartNames, opaque_pages
from lmcache_redis.device.layout import fingerprint_of, named_pairs
from lmcache_redis.errors import FormatError
from lmcache_redis.tier_kinds import HOST, REDIS
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    FramesResult,
    KeysResult,
    ReadOutcome,
)

# Shorter than a tool waits for its answer.
_ANSWER_S = 1.5
# Only for these does it matter what else has the chunk.
_ABSENT = frozenset({"absent", "in_part"})
MOST_LAYOUTS = 1024
_MOST_BYTES = 1 << 20
_EVERY_S = 60.0
_WRITE_S = 5.0


class Explanations:
    """See the module. Owned by the loop thread; callbacks run on it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._names = ChunkNames(DESCRIPTIONS, agent.config.key_prefix)
        agent.loop.every(_EVERY_S, lambda: self.write(agent.peers.registered))

    def why(self, question: m.Why, reply: Reply) -> None:
        history = self._agent.sessions.history
        found = history.find(question.request, question.most)
        report: dict[str, Any] = {
            "kept": len(history),
            "since_s": history.since_s,
            "chunk_size_tokens": self._agent.config.chunk_size_tokens,
            "requests": msgspec.to_builtins(found),
            "canaries": words.not_compared(
                self._agent.config.canary_every, self._agent.cache.metrics.snapshot()
            ),
        }
        lookup = found[0].lookup if len(found) == 1 else None
        if lookup is None or (miss := lookup.first_miss) is None or miss.reason not in _ABSENT:
            reply(_json(report))
            return

        deadline_s, prefix = self._agent.loop.now() + _ANSWER_S, self._agent.config.key_prefix
        own = [
            PartNames(ChunkNames(bytes.fromhex(layout), prefix), lookup.model, kv_rank)
            for layout, kv_rank in zip(lookup.layouts, lookup.kv_ranks, strict=True)
        ]

        def look_for(described: Sequence[PartNames], is_all: bool) -> None:
            others = [*described, *self._registered()]
            others = [each for each in others if each.fingerprint.hex() not in lookup.layouts]
            names = [*own, *{_description(each): each for each in others}.values()]
            keys = [each.key(bytes.fromhex(miss.hash)) for each in names]
            done = posting(self._agent.loop, partial(answer, names, keys, is_all))
            self._agent.redis.exist_whole(keys, deadline_s + _ANSWER_S, done)

        def answer(
            names: Sequence[PartNames], keys: Sequence[bytes], is_all: bool, result: ExistsResult
        ) -> None:
            """Says where each part of the missed chunk is now, and which other layouts have it."""
            in_redis = result.present or [None] * len(keys)
            places = [
                self._place(key) or (REDIS.name if is_there else None)
                for key, is_there in zip(keys, in_redis, strict=True)
            ]
            rest = zip(names[len(own) :], places[len(own) :], strict=True)
            others = dict.fromkeys(each.fingerprint.hex() for each, place in rest if place)
            report["requests"][0]["lookup"]["first_miss"] |= {
                "now": places[: len(own)],
                "other_layouts": [*others],
                "redis_answered": (
                    is_all and result.outcome is CallOutcome.DONE and None not in in_redis
                ),
            }
            reply(_json(report))

        self.names(look_for, deadline_s)

    def _place(self, key: bytes) -> str | None:
        """The host pool, or a tier whose index has the chunk."""
        cache = self._agent.cache
        if key in cache.pool:
            return HOST.name
        tiers = zip(cache.kinds, cache.tiers, strict=True)
        return next((kind.name for kind, tier in tiers if tier.lookup(key)), None)

    def _registered(self) -> list[PartNames]:
        return [form for each in self._agent.peers.registered for form in each.forms]

    def layouts(self, question: m.Layouts, reply: Reply) -> None:
        wanted = tuple(each.lower() for each in question.wanted)
        rows: list[dict[str, Any]] = []
        canonical: dict[str, bytes] = {}  # of those wanted
        for each in self._agent.peers.registered:
            pairs = zip(each.forms, each.device.layouts, strict=True)
            for number, (form, layout) in enumerate(pairs):
                where = {"engine_id": each.engine_id, "worker_id": each.worker_id, "group": number}
                rows.append(_row(form) | where)
                if (name := rows[-1]["layout"]).startswith(wanted):
                    canonical[name] = layout.canonical(each.chunk_tokens)
        here = {(each.fingerprint, each.model_name) for each in self._registered()}
        deadline_s = self._agent.loop.now() + _ANSWER_S

        def listed(described: Sequence[PartNames], is_all: bool) -> None:
            found = {(each.fingerprint, each.model_name): each for each in described}
            others = [each for name, each in found.items() if name not in here]
            rows.extend(map(_row, others))
            chosen = [each for each in others if each.fingerprint.hex().startswith(wanted)]
            self.read(chosen, partial(answer, is_all), deadline_s + _ANSWER_S)

        def answer(is_all: bool, described: Mapping[bytes, bytes]) -> None:
            canonical.update((name.hex(), each) for name, each in described.items())
            for row in rows:
                if row["layout"] in canonical:
                    with contextlib.suppress(FormatError):  # its digest is right all the same
                        row["pairs"] = named_pairs(canonical[row["layout"]])
            reply(_json({"layouts": rows, "redis_listed": is_all}))

        self.names(listed, deadline_s)

    def write(self, registrations: Sequence[Registration]) -> None:
        """Writes those of the layouts of these workers, in the background. May fail."""
        described = {
            _description(form): layout.canonical(each.chunk_tokens)
            for each in registrations
            for form, layout in zip(each.forms, each.device.layouts, strict=True)
        }
        deadline_s, slot_bytes = self._agent.loop.now() + _WRITE_S, self._agent.config.slot_bytes
        jobs = []
        for key, canonical in described.items():
            if (nbytes := len(canonical)) <= _MOST_BYTES:
                stripe_bytes = stripe_payload_bytes(nbytes, slot_bytes)
                frame = self._names.frame(key, opaque_pages(nbytes), stripe_bytes)
                jobs.append(_io(self._names.chunk_key(key), frame, canonical, deadline_s))
        if jobs:
            self._agent.plane.store_all(jobs, lambda job, outcome: None)

    def names(self, done: Callable[[Sequence[PartNames], bool], None], deadline_s: float) -> None:
        """Of the layouts that are described in Redis, how their parts are named; if it is all.

        Not all if Redis does not answer in time. Walks over all of Redis' keys.
        """

        def listed(result: KeysResult) -> None:
            prefix, found = self._agent.config.key_prefix, []
            for key in filter(None, map(self._names.parse, result.keys)):
                if len(key.chunk_hash) == 32:
                    names = ChunkNames(key.chunk_hash, prefix)
                    found.append(PartNames(names, key.model_name, key.kv_rank))
            done(found, result.outcome is CallOutcome.DONE)

        done_listing = posting(self._agent.loop, listed)
        self._agent.plane.list_keys(self._names.common, deadline_s, done_listing, MOST_LAYOUTS)

    def read(
        self,
        names: Sequence[PartNames],
        done: Callable[[Mapping[bytes, bytes]], None],
        deadline_s: float,
    ) -> None:
        """`KVLayout.canonical` of these layouts, by fingerprint, without those that are not there.

        Asks for the size of each first.
        """
        plane, loop = self._agent.plane, self._agent.loop
        keys = {each.fingerprint: self._names.chunk_key(_description(each)) for each in names}
        found: dict[bytes, bytes] = {}
        waiting: set[ChunkIO] = set()

        def framed(result: FramesResult) -> None:
            # Without frames if Redis does not answer.
            for (fingerprint, key), frame in zip(keys.items(), result.frames, strict=False):
                if (
                    frame is not None
                    and (frame.fingerprint, frame.chunk_hash) == (DESCRIPTIONS, fingerprint)
                    and 0 < frame.chunk_bytes <= _MOST_BYTES
                ):
                    waiting.add(_io(key, frame, bytes(frame.chunk_bytes), deadline_s))
            if waiting:
                plane.load_all([*waiting], posting(loop, read))
            else:
                done(found)

        def read(job: ChunkIO, outcome: ReadOutcome) -> None:
            canonical, fingerprint = b"".join(job.slots), job.frame.chunk_hash
            if outcome is ReadOutcome.LOADED and fingerprint_of(canonical) == fingerprint:
                found[fingerprint] = canonical
            waiting.discard(job)
            if not waiting:
                done(found)

        plane.describe([*keys.values()], deadline_s, posting(loop, framed))


def _description(names: PartNames) -> ObjectKey:
    """The key of their layout's description."""
    return ObjectKey(names.fingerprint, names.model_name, names.kv_rank)


def _row(names: PartNames) -> dict[str, Any]:
    """A layout for JSON. engine_id: None if no engine with it is registered here."""
    return {
        "layout": names.fingerprint.hex(),
        "model": names.model_name,
        "kv_rank": names.kv_rank,
        "engine_id": None,
        "pairs": None,
    }


def _json(report: Mapping[str, Any]) -> m.StatusReport:
    return m.StatusReport(0, msgspec.json.encode(report))


def _io(key: bytes, frame: ChunkFrame, content: bytes, deadline_s: float) -> ChunkIO:
    whole, size = memoryview(bytearray(content)), frame.stripe_payload_bytes
    slots = [whole[first : first + size] for first in range(0, len(content), size)]
    return ChunkIO(key, frame, slots, deadline_s)
