# SPDX-License-Identifier: Apache-2.0
"""Canaries: chunks that an engine has computed are compared with the cached ones.

A comparison gathers blocks as a store does, into slots of its own, and compares them with the parts
that the request's lookup has pinned (`device.distance`). What is not in the host pool any more,
finds no room, is read after the lease, or holds no numbers is not compared.

It cannot be told which of two parts that differ is wrong, nor what else is. So the chunk leaves the
pool and the tiers (`cache.doubted`), and the next store writes it anew. And its layout is
distrusted in its epoch: nothing of it is loaded until it is trusted again (`peers.LayoutTrust`).
Agents that hold the chunk are not told, and write it to Redis again until they find it wrong too.

Where a name covers a medium, a client may have given two contents one name. If such a chunk differs
it is removed, and its layout stays trusted: no client turns off the cache of others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.jobs import StoreJob
from lmcache_redis.agent.peers import CANARIES_AGAIN
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.threads import posting
from lmcache_redis.chunks.keys import held_ranks, overlapping_ranks
from lmcache_redis.device.distance import Distance, far_apart, part_distance
from lmcache_redis.device.layout import KVLayout

logger = logging.getLogger(__name__)

# Beyond all that numbers are apart; what is no number would make the histogram's sum infinite.
_FARTHEST = 10.0


class CompareJob(StoreJob):
    """Compares blocks with parts in the host pool. Stores nothing."""

    _question: m.Compare
    _layout: KVLayout
    _limit: float
    _cached: dict[int, Entry]  # by chunk, each with a pin of this job
    _distances: dict[int, Distance | None]
    _farthest = -1.0  # of all distances

    def start(self) -> None:
        self._layout = self._registration.device.layouts[self._question.group]
        self._limit = far_apart(self._layout)
        self._distances = {}
        self._cached = self._pinned()
        uncompared = len(self._hashes) - len(self._cached)
        self._cache.metrics.count("uncompared_chunks", uncompared)
        self._gather([*self._cached])

    def _take(self, chunk: int) -> Entry | None:
        return self._cache.reserve(self._form, self._hashes[chunk], is_hidden=True)

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            super()._copied(entries, outcome)
            return
        # Behind the gathers that are queued: engines wait for these.
        ended = posting(self._cache.owner, partial(super()._copied, entries))
        compare = partial(self._compare, entries)
        self._agent.copies.put("gather", self._registration.place, compare, ended)

    def _compare(self, entries: Mapping[int, Entry]) -> CopyOutcome:
        # On a copy thread.
        for chunk, entry in entries.items():
            cached, computed = map(self._cache.views, (self._cached[chunk], entry))
            self._distances[chunk] = part_distance(
                self._layout, self._blocks_per_part, cached, computed
            )
        return CopyOutcome.DONE

    def _ended(self, chunk: int, entry: Entry | None, outcome: CopyOutcome) -> None:
        try:
            if entry is not None:
                self._cache.abandon(entry)
        finally:
            self._blocks_read((chunk,))
        cached = self._cached.pop(chunk)
        self._cache.pool.unpin(cached)
        if outcome is not CopyOutcome.DONE:
            self._distances[chunk] = None
        distance = self._distances.get(chunk)
        if distance is None:
            self._cache.metrics.count("uncompared_chunks")
            return
        self._cache.metrics.count("compared_chunks")
        self._cache.metrics.observe("canary_distance", min(distance.far, _FARTHEST))
        self._farthest = max(self._farthest, distance.far)
        if distance.far > self._limit:
            self._differs(chunk, cached, distance)

    def _differs(self, chunk: int, cached: Entry, distance: Distance) -> None:
        chunk_hash, form = self._hashes[chunk], self._form
        self._cache.metrics.count("differing_chunks")
        self._cache.remove(form.key(chunk_hash), cached.form.stripe_count)
        # Engines of other sizes have the same shares in entries of their own, here or on disk.
        if form.shares is not None:
            stripes = cached.form.stripe_count // form.shares.count  # of a share
            for kv_rank in overlapping_ranks(form.kv_rank):
                if kv_rank != form.kv_rank:
                    key = replace(form, kv_rank=kv_rank).key(chunk_hash)
                    self._cache.remove(key, stripes * len(held_ranks(kv_rank)))
        if chunk >= len(self._hashes) - self._question.client_named:
            if self._agent.trust.differed_by_name(form.fingerprint):
                logger.warning(
                    "the cached KV of a prompt with media, of %s, is not what its engine has "
                    "computed: layout %s, chunk %s. A client may have given two media one name, so "
                    "only this chunk is removed (all such are counted, and the first is logged)",
                    form.model_name, form.fingerprint.hex()[:16], chunk_hash.hex()[:16],
                )  # fmt: skip
            return
        if self._agent.trust.differed(form.fingerprint, chunk_hash):
            logger.error(
                "the cached KV of %s is not what its engine has computed: layout %s, chunk %s, "
                "group %d, block %d of segment %d is %.2f away, and rounding at most %.2f. Nothing "
                "of this layout is loaded any more. Find out what the engines that share it do not "
                "share (weights, adapters, images, versions), remove its chunks with "
                "`lmcache-redis purge --layout`, and load again with `lmcache-redis trust`",
                form.model_name, form.fingerprint.hex()[:16], chunk_hash.hex()[:16],
                self._question.group, distance.block, distance.segment, distance.far,
                self._limit,
            )  # fmt: skip

    def _answer(self) -> None:
        self._reply(m.StoreResult(0, 0, len(self._hashes), 0))

    def _finish(self) -> None:
        layout = self._form.fingerprint
        # A canary counts once, in however many steps and on however many ranks it is computed.
        if 0.0 <= self._farthest <= self._limit and layout not in self._session.agreed:
            self._session.agreed.add(layout)
            if self._agent.trust.agreed(layout, self._hashes[0]):
                logger.warning(
                    "layout %s of %s is loaded again: %d canaries in a row found no difference",
                    layout.hex()[:16], self._form.model_name, CANARIES_AGAIN,
                )  # fmt: skip
        self._session.past.compared += sum(each is not None for each in self._distances.values())
