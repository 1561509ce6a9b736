# SPDX-License-Identifier: Apache-2.0
"""A test for each promise of `tiers.Tier`. Inherit from `TierContract`, and let pytest collect it:

    class TestMyTier(TierContract):
        @contextmanager
        def opened(self): ...

        @contextmanager
        def stalled(self, tier): ...

        def damage(self, tier, key): ...

Waits are bounded by `PATIENCE_S`, and end as soon as there is an answer.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    FramesResult,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    Tier,
    WriteOutcome,
)

PATIENCE_S = 30.0
# Until a tier that cannot abandon an operation gives up: its own patience.
LATE_S = 10.0
_GUARD = 64
_HASH_BYTES = 32
_numbers = itertools.count(1)


def form_of(
    model_name: str, *, fingerprint: bytes = bytes(range(32)), chunk_bytes: int = 200_000
) -> ChunkForm:
    """Chunks of several stripes, the last of which is shorter."""
    return ChunkForm.of(ChunkNames(fingerprint), model_name, 0, opaque_pages(chunk_bytes), 1 << 16)


class Transfer:
    """A chunk to load or to store, in slots between bytes that must not change.

    outcomes: of its answers: there is to be one.
    """

    def __init__(self, form: ChunkForm, name: bytes, payload: bytes | None = None) -> None:
        self.frame = form.frame(name)
        sizes = form.stripe_sizes
        self._memory = bytearray(b"\xa5" * (sum(sizes) + _GUARD * (len(sizes) + 1)))
        self.slots, at = [], _GUARD
        for size in sizes:
            self.slots.append(memoryview(self._memory)[at : at + size])
            at += size + _GUARD
        self.key = form.key(name)
        self._shares = form.shares
        self.outcomes: list[Any] = []
        if payload is not None:
            self.fill(payload)

    def job(self, deadline_s: float = PATIENCE_S) -> ChunkIO:
        until_s = time.monotonic() + deadline_s
        job = ChunkIO(self.key, self.frame, self.slots, until_s, tag=self)
        job.shares = self._shares
        return job

    def fill(self, payload: bytes) -> None:
        at = 0
        for slot in self.slots:
            slot[:] = payload[at : at + len(slot)]
            at += len(slot)

    @property
    def payload(self) -> bytes:
        return b"".join(self.slots)

    @property
    def is_inside(self) -> bool:
        """Whether the bytes around its slots are as they were."""
        around, at = [], 0
        for slot in (*self.slots, b""):
            around.append(self._memory[at : at + _GUARD])
            at += _GUARD + len(slot)
        return all(each == b"\xa5" * _GUARD for each in around)


def wait_for(condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.002)


class TierContract(ABC):
    """See the module. Each test opens a tier of its own."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Tier]:
        """An empty tier that is up; it is closed at the end."""

    @abstractmethod
    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        """Where the tier keeps chunks does not answer loads, so that it goes down; at the end it
        answers again. Chunks that are loaded meanwhile may be lost, others not.
        """

    @abstractmethod
    def damage(self, tier: Tier, key: bytes) -> None:
        """Changes bytes of the payload of a stored chunk, where the tier keeps it."""

    # ------------------------------------------------------------- transfers

    def test_a_chunk_comes_back_as_it_was(self) -> None:
        with self.opened() as tier:
            stored = [_stored(tier) for _ in range(3)]
            loads = [Transfer(_FORM, each.name) for each in stored]
            assert _load(tier, *loads) == [ReadOutcome.LOADED] * 3
            for load, chunk in zip(loads, stored, strict=True):
                assert load.payload == chunk.payload
                assert load.is_inside, "a load wrote outside of its slots"
            _expect_no_more(tier, *loads)

    def test_what_was_never_stored_is_missing(self) -> None:
        with self.opened() as tier:
            load = Transfer(_FORM, _new_name())
            assert _load(tier, load) == [ReadOutcome.MISSING]
            assert load.is_inside

    def test_the_last_store_is_what_is_loaded(self) -> None:
        with self.opened() as tier:
            chunk = _stored(tier)
            newer = _NewChunk(chunk.name)
            assert _store(tier, newer.transfer()) == [WriteOutcome.STORED]
            load = Transfer(_FORM, chunk.name)
            assert _load(tier, load) == [ReadOutcome.LOADED]
            assert load.payload == newer.payload

    def test_another_frame_is_never_loaded(self) -> None:
        """Of another layout or size, under the key of the stored chunk."""
        others = (
            form_of("model", fingerprint=bytes(reversed(range(32)))),
            form_of("model", chunk_bytes=200_064),
            form_of("model", chunk_bytes=100_000),
        )
        with self.opened() as tier:
            for other in others:
                chunk = _stored(tier)
                load = Transfer(other, chunk.name)
                load.key = _FORM.key(chunk.name)
                (outcome,) = _load(tier, load)
                assert outcome is not ReadOutcome.LOADED, "the chunk of another layout"
                assert load.is_inside

    def test_damaged_bytes_are_never_loaded(self) -> None:
        with self.opened() as tier:
            chunk = _stored(tier)
            self.damage(tier, _FORM.key(chunk.name))
            (outcome,) = _load(tier, Transfer(_FORM, chunk.name))
            assert outcome is not ReadOutcome.LOADED
            # It can be stored again.
            assert _store(tier, chunk.transfer()) == [WriteOutcome.STORED]
            assert _load(tier, Transfer(_FORM, chunk.name)) == [ReadOutcome.LOADED]

    def test_nothing_begins_after_its_deadline(self) -> None:
        with self.opened() as tier:
            chunk, other = _stored(tier), _NewChunk()
            late = other.transfer()
            assert _store(tier, late, deadline_s=-1.0) == [WriteOutcome.TIMED_OUT]
            load = Transfer(_FORM, chunk.name)
            assert _load(tier, load, deadline_s=-1.0) == [ReadOutcome.TIMED_OUT]
            assert _exist(tier, other.name) == [False]
            _expect_no_more(tier, late, load)

    def test_a_cancelled_load_gives_its_slots_back(self) -> None:
        with self.opened() as tier:
            stored = [_stored(tier) for _ in range(8)]
            loads = [Transfer(_FORM, each.name) for each in stored]
            jobs = [each.job() for each in loads]
            pattern = b"\x5a" * len(loads[0].payload)

            def done(job: ChunkIO, outcome: ReadOutcome) -> None:
                if outcome is ReadOutcome.CANCELLED:
                    _transfer(job).fill(pattern)
                _transfer(job).outcomes.append(outcome)

            tier.load_all(jobs, done)
            for job in jobs:
                tier.cancel(job)
            wait_for(lambda: all(each.outcomes for each in loads), "a cancelled load ends")
            _expect_no_more(tier, *loads)
            for load, chunk in zip(loads, stored, strict=True):
                (outcome,) = load.outcomes
                assert outcome in (ReadOutcome.CANCELLED, ReadOutcome.LOADED)
                is_loaded = outcome is ReadOutcome.LOADED
                said = "slots were written after the job had ended"
                assert load.payload == (chunk.payload if is_loaded else pattern), said
                tier.cancel(_NO_JOB)  # of what has ended, and of what never was: nothing

    def test_a_cancelled_store_is_whole_or_not_there(self) -> None:
        with self.opened() as tier:
            chunks = [_NewChunk() for _ in range(8)]
            stores = [each.transfer() for each in chunks]
            jobs = [each.job() for each in stores]

            def done(job: ChunkIO, outcome: WriteOutcome) -> None:
                _transfer(job).fill(bytes(job.nbytes))  # the slots are free
                _transfer(job).outcomes.append(outcome)

            tier.store_all(jobs, done)
            for job in jobs:
                tier.cancel(job)
            wait_for(lambda: all(each.outcomes for each in stores), "a cancelled store ends")
            _expect_no_more(tier, *stores)
            for store, chunk in zip(stores, chunks, strict=True):
                load = Transfer(_FORM, chunk.name)
                (outcome,) = _load(tier, load)
                if store.outcomes == [WriteOutcome.STORED]:
                    assert outcome is ReadOutcome.LOADED
                if outcome is ReadOutcome.LOADED:
                    assert load.payload == chunk.payload, "what the slots had afterwards"
                # And it is not found any more after a removal.
                assert _remove(tier, chunk.name).outcome is CallOutcome.DONE
                assert _exist(tier, chunk.name) == [False]

    # ------------------------------------------------------------- questions

    def test_questions_are_answered_in_order(self) -> None:
        with self.opened() as tier:
            names = [_stored(tier).name, _new_name(), _stored(tier).name, _new_name()]
            keys = [_FORM.key(each) for each in names]
            assert _exist(tier, *names) == [True, False, True, False]
            scanned = _answer(tier.scan, keys, _soon())
            assert scanned == ScanResult(CallOutcome.DONE, 1)
            assert _answer(tier.scan, keys[1:], _soon()).prefix_length == 0
            if tier.lookup(keys[0]) is not None:
                assert [tier.lookup(key) for key in keys] == [True, False, True, False]
            else:
                assert [tier.lookup(key) for key in keys] == [None] * 4, "no index, for every key"
            refreshed = self._refresh(tier, names, 0.0)
            assert refreshed.present == [True, False, True, False]

    def test_a_claim_is_given_once_and_can_be_given_back(self) -> None:
        """A tier with one writer has no claims."""
        with self.opened() as tier:
            names = [_new_name(), _new_name()]
            first = self._refresh(tier, names, 60.0)
            assert first.present == [False, False]
            if not first.claimed:
                tier.unclaim([_FORM.key(each) for each in names])
                return
            assert [*first.claimed] == [True, True]
            assert [*self._refresh(tier, names, 60.0).claimed] == [False, False]
            tier.unclaim([_FORM.key(names[0])])
            again: list[bool | None] = []

            def is_free() -> bool:
                again[:] = self._refresh(tier, names, 60.0).claimed
                return again[0] is True

            wait_for(is_free, "a claim that was given back is free")
            assert again == [True, False]

    def _refresh(self, tier: Tier, names: Sequence[bytes], claim_s: float) -> ExistsResult:
        chunks = [(_FORM.key(each), _FORM.stripe_count) for each in names]
        found: list[ExistsResult] = []
        tier.refresh(chunks, _soon(), found.append, claim_s)
        wait_for(lambda: found, "refresh answers")
        assert found[0].outcome is CallOutcome.DONE
        return found[0]._replace(present=[*found[0].present])

    def test_chunks_are_described_and_listed(self) -> None:
        with self.opened() as tier:
            other = form_of("other model")
            chunks = [_stored(tier), _stored(tier, other), _stored(tier)]
            keys = [chunks[0].key, chunks[1].key, _FORM.key(_new_name())]
            described: FramesResult = _answer(tier.describe, keys, _soon())
            wanted = [_FORM.frame(chunks[0].name), other.frame(chunks[1].name), None]
            assert described == FramesResult(CallOutcome.DONE, wanted)
            listed = tier.keys(_FORM.stem(_HASH_BYTES), _soon(), 100)
            assert listed.outcome is CallOutcome.DONE
            assert sorted(listed.keys) == sorted((chunks[0].key, chunks[2].key))
            few = tier.keys(_FORM.stem(_HASH_BYTES), _soon(), 1)
            assert few.outcome is CallOutcome.OVER_LIMIT

    # -------------------------------------------------------------- removals

    def test_what_was_removed_is_not_found(self) -> None:
        with self.opened() as tier:
            gone, stays = _stored(tier), _stored(tier)
            removed = _remove(tier, gone.name)
            assert removed.outcome is CallOutcome.DONE
            assert removed.removed > 0
            assert _exist(tier, gone.name, stays.name) == [False, True]
            assert _load(tier, Transfer(_FORM, gone.name)) == [ReadOutcome.MISSING]
            assert _remove(tier, gone.name)[:2] == (CallOutcome.DONE, 0)
            assert _store(tier, gone.transfer()) == [WriteOutcome.STORED]
            assert _exist(tier, gone.name) == [True]

    def test_what_is_newer_may_stay(self) -> None:
        """Where a chunk says when it was stored; what says nothing goes."""
        with self.opened() as tier:
            chunk, now_ms = _stored(tier), time.time_ns() // 1_000_000
            before = _remove(tier, chunk.name, newest_unix_ms=now_ms - 3_600_000)
            assert before.outcome is CallOutcome.DONE
            assert _exist(tier, chunk.name) == [not before.removed]
            stripes = _FORM.stripe_count
            after = _remove(tier, chunk.name, stripes, now_ms + 3_600_000)
            assert after.outcome is CallOutcome.DONE
            assert _exist(tier, chunk.name) == [False]

    def test_a_clear_removes_what_begins_so(self) -> None:
        with self.opened() as tier:
            other, third = form_of("other model"), form_of("third model")
            stays, *gone = (_stored(tier, form) for form in (_FORM, other, other, third))
            prefixes = [other.stem(_HASH_BYTES), third.stem(_HASH_BYTES)]
            cleared: RemoveResult = _answer(tier.clear, prefixes, _soon())
            assert cleared.outcome is CallOutcome.DONE
            assert cleared.removed >= 3
            found = _answer(tier.exists, [each.key for each in (stays, *gone)], _soon())
            assert [*found.present] == [True, False, False, False]

    # ------------------------------------------------- what is down, and ends

    def test_one_answer_each_while_nothing_answers(self) -> None:
        """By its deadline, or when the tier's patience ends; down, at once. Nothing is lost."""
        with self.opened() as tier:
            asked, kept = _stored(tier), _stored(tier)
            transfers: list[Transfer] = []
            with self.stalled(tier):

                def is_down() -> bool:
                    if not tier.state.up:
                        return True
                    load = Transfer(_FORM, asked.name)
                    transfers.append(load)
                    (outcome,) = _load(tier, load, deadline_s=0.5, within_s=LATE_S)
                    assert outcome is not ReadOutcome.LOADED
                    return False

                wait_for(is_down, "a tier that does not answer goes down")
                assert tier.state.reason, "a tier that is down says why"
                self._is_down(tier, kept, transfers)
            wait_for(lambda: tier.state.up, "a tier that can answer comes up again")
            assert _exist(tier, kept.name) == [True], "a tier that is down removed a chunk"
            load = Transfer(_FORM, kept.name)
            assert _load(tier, load) == [ReadOutcome.LOADED]
            assert load.payload == kept.payload
            _expect_no_more(tier, *transfers, load)

    def _is_down(self, tier: Tier, kept: _NewChunk, transfers: list[Transfer]) -> None:
        load, store = Transfer(_FORM, kept.name), _NewChunk().transfer()
        transfers += (load, store)
        assert _load(tier, load, within_s=1.0) == [ReadOutcome.UNAVAILABLE]
        assert _store(tier, store, within_s=1.0) == [WriteOutcome.UNAVAILABLE]
        assert not tier.lookup(kept.key), "down, and its index says that it has the chunk"
        found = _answer(tier.exists, [kept.key], _soon())
        said = "what is not known was answered as absent"
        assert found.outcome is CallOutcome.UNAVAILABLE or [*found.present] == [None], said
        assert _answer(tier.scan, [kept.key], _soon()).outcome is CallOutcome.UNAVAILABLE
        assert _answer(tier.clear, [_FORM.stem(_HASH_BYTES)], _soon()).removed == 0

    def test_every_job_ends_with_the_tier(self) -> None:
        with self.opened() as tier:
            stored = [_stored(tier) for _ in range(8)]
            transfers = [Transfer(_FORM, each.name) for each in stored]
            tier.load_all([each.job() for each in transfers], _note)
            stores = [_NewChunk().transfer() for _ in range(8)]
            tier.store_all([each.job() for each in stores], _note)
            assert tier.close(PATIENCE_S)
            wait_for(lambda: all(each.outcomes for each in (*transfers, *stores)), "a job ends", 1)
            assert tier.close(PATIENCE_S), "to close it again does nothing"
            time.sleep(0.05)
            for each in (*transfers, *stores):
                assert len(each.outcomes) == 1
            for load, chunk in zip(transfers, stored, strict=True):
                if load.outcomes == [ReadOutcome.LOADED]:
                    assert load.payload == chunk.payload


_FORM = form_of("model")
_NO_JOB = Transfer(_FORM, bytes(_HASH_BYTES)).job()


class _NewChunk:
    def __init__(self, name: bytes | None = None, form: ChunkForm | None = None) -> None:
        self.name = _new_name() if name is None else name
        self.form = form or _FORM
        self.payload = random.Random(next(_numbers)).randbytes(self.form.chunk_bytes)

    @property
    def key(self) -> bytes:
        return self.form.key(self.name)

    def transfer(self) -> Transfer:
        return Transfer(self.form, self.name, self.payload)


def _new_name() -> bytes:
    return random.randbytes(_HASH_BYTES)


def _soon() -> float:
    return time.monotonic() + PATIENCE_S


def _transfer(job: ChunkIO) -> Transfer:
    assert isinstance(job.tag, Transfer)
    return job.tag


def _note(job: ChunkIO, outcome: object) -> None:
    _transfer(job).outcomes.append(outcome)


def _stored(tier: Tier, form: ChunkForm | None = None) -> _NewChunk:
    chunk = _NewChunk(form=form)
    assert _store(tier, chunk.transfer()) == [WriteOutcome.STORED]
    return chunk


def _store(
    tier: Tier, *transfers: Transfer, deadline_s: float = PATIENCE_S, within_s: float = PATIENCE_S
) -> list[WriteOutcome]:
    tier.store_all([each.job(deadline_s) for each in transfers], _note)
    return _outcomes(transfers, within_s)


def _load(
    tier: Tier, *transfers: Transfer, deadline_s: float = PATIENCE_S, within_s: float = PATIENCE_S
) -> list[ReadOutcome]:
    tier.load_all([each.job(deadline_s) for each in transfers], _note)
    return _outcomes(transfers, within_s)


def _outcomes(transfers: Sequence[Transfer], within_s: float) -> list[Any]:
    wait_for(lambda: all(each.outcomes for each in transfers), "each job is answered", within_s)
    return [each.outcomes[0] for each in transfers]


def _answer(ask: Callable[..., None], *arguments: Any) -> Any:
    answers: list[Any] = []
    answered = threading.Event()

    def done(answer: Any) -> None:
        answers.append(answer)
        answered.set()

    ask(*arguments, done)
    assert answered.wait(PATIENCE_S), "a question is not answered"
    (answer,) = answers
    return answer


def _exist(tier: Tier, *names: bytes) -> list[bool | None]:
    found: ExistsResult = _answer(tier.exists, [_FORM.key(each) for each in names], _soon())
    assert found.outcome is CallOutcome.DONE
    return [*found.present]


def _remove(
    tier: Tier, name: bytes, stripe_count: int = 0, newest_unix_ms: int | None = None
) -> RemoveResult:
    def remove(done: Done[RemoveResult]) -> None:
        tier.remove(_FORM.key(name), _soon(), done, stripe_count, newest_unix_ms)

    removed: RemoveResult = _answer(remove)
    return removed


def _expect_no_more(tier: Tier, *transfers: Transfer) -> None:
    """Whatever comes late has come before the answer to a question."""
    _exist(tier, _new_name())
    time.sleep(0.05)
    for each in transfers:
        assert len(each.outcomes) == 1, f"a job with the answers {each.outcomes}"
