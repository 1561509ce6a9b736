# SPDX-License-Identifier: Apache-2.0
"""A tier in which each share of a chunk is a chunk of its own, for engines of other sizes.

    of the cache            kv_rank "shares 4 to 7 of 8", in the memory of one entry
    of the tier             kv_rank "share 4 of 8", …, "share 7 of 8", a part of that memory each

A chunk is loaded, stored and removed with all of its shares. It counts as found where its first
share is: that is one question for a chunk, as without shares. One whose others are not there is
MISSING when it is loaded: they may be on their way. A store asks about all of them.
What has no shares goes to the tier as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

from lmcache_redis.chunks.names import ShareKeys
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    KeysResult,
    PlaneState,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    Tier,
    TierPlace,
    WriteDone,
    WriteOutcome,
)


class SharingTier:
    """See the module; `tiers.Tier` has what the methods promise.

    key_prefix: the user's, of all keys.
    """

    def __init__(self, tier: Tier, key_prefix: bytes = b"") -> None:
        self.tier = tier
        self._keys = ShareKeys(key_prefix)
        self._in_flight: dict[ChunkIO, list[ChunkIO]] = {}  # the shares of each

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def state(self) -> PlaneState:
        return self.tier.state

    @property
    def place(self) -> TierPlace:
        return self.tier.place

    def close(self, deadline_s: float) -> bool:
        return self.tier.close(deadline_s)

    # ------------------------------------------------------------------ questions

    def lookup(self, key: bytes) -> bool | None:
        keys = self._keys.of(key)
        if len(keys) == 1:
            return self.tier.lookup(key)
        found = [self.tier.lookup(each) for each in keys]
        return None if None in found else all(found)

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        self.tier.scan(self._keys.first_of_each(keys), deadline, done)

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        self.tier.exists(self._keys.first_of_each(keys), deadline, done)

    def exist_whole(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        """As `exists`, of all shares."""
        each = [self._keys.of(key) for key in keys]
        answered = partial(self._refreshed, each, done)
        self.tier.exists([*chain.from_iterable(each)], deadline, answered)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        """As `Tier.describe`; a chunk in shares has the frame of the first."""
        self.tier.describe(self._keys.first_of_each(keys), deadline, done)

    def keys(self, prefix: bytes, deadline: float, limit: int) -> KeysResult:
        first = self._keys.first(prefix)
        outcome, keys = self.tier.keys(first, deadline, limit)
        return KeysResult(outcome, [prefix + key[len(first) :] for key in keys])

    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        each = [self._keys.of(key) for key, _ in chunks]
        if all(len(keys) == 1 for keys in each):
            self.tier.refresh(chunks, deadline, done, claim_s)
            return
        stripes = [count // len(keys) for keys, (_, count) in zip(each, chunks, strict=True)]
        asked = [(key, count) for keys, count in zip(each, stripes, strict=True) for key in keys]
        answered = partial(self._refreshed, each, done)
        self.tier.refresh(asked, deadline, answered, claim_s)

    def _refreshed(
        self, each: Sequence[Sequence[bytes]], done: Done[ExistsResult], result: ExistsResult
    ) -> None:
        present, claimed = [*result.present], [*result.claimed]
        ends = [0, *accumulate(map(len, each))]
        runs = [slice(*ends) for ends in pairwise(ends)]
        all_claimed = [_all(claimed[run]) for run in runs] if claimed else []
        # Others write some of the shares. Ours would hold them up.
        unused = [
            key
            for keys, run, is_ours in zip(each, runs, all_claimed, strict=False)
            if is_ours is not True
            for key, is_claimed in zip(keys, claimed[run], strict=True)
            if is_claimed
        ]
        if unused:
            self.tier.unclaim(unused)
        all_present = [_all(present[run]) for run in runs] if present else []
        done(ExistsResult(result.outcome, all_present, all_claimed))

    def unclaim(self, keys: Sequence[bytes]) -> None:
        self.tier.unclaim([each for key in keys for each in self._keys.of(key)])

    # ------------------------------------------------------------------ transfers

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        def ended(job: ChunkIO, outcome: ReadOutcome) -> None:
            if not isinstance(whole := job.tag, _Whole):
                done(job, outcome)
                return
            if whole.ended(job, outcome):
                del self._in_flight[whole.job]
                done(whole.job, _read_outcome(whole.outcomes))
            elif outcome is not ReadOutcome.LOADED and not whole.is_given_up:
                whole.is_given_up = True  # the others are of no use
                self.cancel(whole.job)

        shares = [self._shares(job) for job in jobs]
        if any(len(each) > 1 for each in shares):
            self.tier.load_all([*chain.from_iterable(shares)], ended)
        else:
            self.tier.load_all(jobs, done)

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        def ended(job: ChunkIO, outcome: WriteOutcome) -> None:
            if not isinstance(whole := job.tag, _Whole):
                done(job, outcome)
            elif whole.ended(job, outcome):
                whole.job.stored_bytes = sum(each.stored_bytes for each in whole.outcomes)
                stored, found = WriteOutcome.STORED, whole.outcomes.values()
                del self._in_flight[whole.job]
                done(whole.job, next((each for each in found if each is not stored), stored))

        shares = [self._shares(job) for job in jobs]
        if any(len(each) > 1 for each in shares):
            # The first share, which shows that the chunk is there, is the last to be sent.
            self.tier.store_all([share for each in shares for share in reversed(each)], ended)
        else:
            self.tier.store_all(jobs, done)

    def cancel(self, job: ChunkIO) -> None:
        for each in self._in_flight.get(job, (job,)):
            self.tier.cancel(each)

    def _shares(self, job: ChunkIO) -> Sequence[ChunkIO]:
        """The transfers of a job's shares; of one that has none, itself."""
        if job.shares is None or job.shares.count < 2:
            return (job,)
        whole, stripes = _Whole(job), job.frame.stripe_count
        shares = self._in_flight[job] = [
            ChunkIO(
                key,
                replace(job.frame, share=job.frame.share + number),
                job.slots[number * stripes : (number + 1) * stripes],
                job.deadline,
                whole,
                job.is_asked_for,
                job.tenant,
            )
            for number, key in enumerate(self._keys.of(job.key))
        ]
        whole.left = len(shares)
        return shares

    # ------------------------------------------------------------------- removals

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        keys, found, lock = self._keys.of(key), [], threading.Lock()

        def removed(result: RemoveResult) -> None:
            with lock:
                found.append(result)
                is_last = len(found) == len(keys)
            if is_last:
                is_done = CallOutcome.DONE
                outcome = next((o for o, _, _ in found if o is not is_done), is_done)
                count = sum(each.removed for each in found)
                stripes = max(each.stripe_count for each in found) * len(keys)
                done(RemoveResult(outcome, count, stripes))

        for each in keys:
            self.tier.remove(each, deadline, removed, stripe_count // len(keys), newest_unix_ms)

    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        prefixes = [each for prefix in key_prefixes for each in self._keys.of(prefix)]
        self.tier.clear(prefixes, deadline, done)


class _Whole:
    """A transfer of a chunk in shares. Ends may come on any thread.

    left: shares whose transfers have not ended. outcomes: of the others.
    """

    def __init__(self, job: ChunkIO) -> None:
        self.job = job
        self.left: int
        self.is_given_up = False
        self.outcomes: dict[ChunkIO, Any] = {}
        self._lock = threading.Lock()

    def ended(self, share: ChunkIO, outcome: ReadOutcome | WriteOutcome) -> bool:
        """Whether it was the last one."""
        with self._lock:
            self.outcomes[share] = outcome
            self.left -= 1
            return not self.left


def _read_outcome(outcomes: Mapping[ChunkIO, ReadOutcome]) -> ReadOutcome:
    """Of the whole. What was given up, because another had failed, says nothing."""
    found = set(outcomes.values())
    loaded, cancelled = ReadOutcome.LOADED, ReadOutcome.CANCELLED
    faults = found - {loaded, cancelled}
    if faults - {ReadOutcome.MISSING}:
        return min(faults - {ReadOutcome.MISSING}, key=[*ReadOutcome].index)
    if faults:
        return ReadOutcome.MISSING
    return cancelled if cancelled in found else loaded


def _all(answers: Sequence[bool | None]) -> bool | None:
    """None, not known, unless one is no."""
    if False in answers:
        return False
    return None if None in answers else True
