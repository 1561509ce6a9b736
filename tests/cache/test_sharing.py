# SPDX-License-Identifier: Apache-2.0
"""What becomes of a chunk of whose shares some are not there, or are others'."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random

import pytest

from lmcache_redis.cache.sharing import SharingTier
from lmcache_redis.chunks.keys import held_ranks, overlapping_ranks, share_rank
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, ShareKeys, opaque_pages
from lmcache_redis.errors import FormatError
from lmcache_redis.objects.cache import HeapMemory
from lmcache_redis.testing.memory_tier import MemoryTier
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    Tier,
    WriteDone,
    WriteOutcome,
)
from tests.testing import test_tier_contract as contracts

PREFIX = b"team:"
NAME = bytes(range(32))
SHARES = 4
SIZE = 3000


def form(first: int, held: int, shares: int = SHARES) -> ChunkForm:
    return ChunkForm.of(
        ChunkNames(bytes(32), PREFIX),
        "model",
        share_rank(shares, first, held),
        opaque_pages(held * SIZE),
        1 << 10,
        of_share=opaque_pages(SIZE),
    )


WHOLE, LOW, HIGH = form(0, 4), form(0, 2), form(2, 2)
PLAIN = ChunkForm.of(ChunkNames(bytes(32), PREFIX), "model", 0, opaque_pages(SIZE), 1 << 10)


def job(of: ChunkForm, payload: bytes = b"") -> ChunkIO:
    memory = memoryview(bytearray(payload or of.chunk_bytes))
    slots = HeapMemory().views(memory, of.stripe_sizes)
    return ChunkIO(of.key(NAME), of.frame(NAME), slots, time.monotonic() + 30.0, shares=of.shares)


def payload(first: int, held: int) -> bytes:
    """Each share is full of its number."""
    return b"".join(bytes([first + number]) * SIZE for number in range(held))


def store(tier: SharingTier, of: ChunkForm, content: bytes) -> ChunkIO:
    ended: list[WriteOutcome] = []
    write = job(of, content)
    tier.store_all([write], lambda _, outcome: ended.append(outcome))
    assert ended == [WriteOutcome.STORED]
    return write


def load(tier: SharingTier, of: ChunkForm) -> tuple[ReadOutcome, bytes]:
    ended: list[ReadOutcome] = []
    read = job(of)
    tier.load_all([read], lambda _, outcome: ended.append(outcome))
    (outcome,) = ended
    return outcome, b"".join(read.slots)


@pytest.fixture
def tier() -> SharingTier:
    return SharingTier(MemoryTier(), PREFIX)


def test_ranks_of_shares_that_are_held_together() -> None:
    assert held_ranks(share_rank(8, 4, 4)) == [share_rank(8, each) for each in (4, 5, 6, 7)]
    assert held_ranks(share_rank(255, 0, 255)) == [share_rank(255, each) for each in range(255)]
    # A rank of its own has a local rank below the size of a world.
    for alone in (share_rank(8, 7), share_rank(255, 254), 0, 0xFFFF_FFFF, 0x0000_00FF, 0x0801_08FF):
        assert held_ranks(alone) == [alone]
    for shares, first, held in ((8, 6, 3), (8, 7, 2), (8, 0, 0), (8, 0, 9)):
        with pytest.raises(FormatError):
            share_rank(shares, first, held)
    whole, share = opaque_pages(6000), opaque_pages(999)
    with pytest.raises(FormatError, match="2 shares of 999 bytes are no chunk of 6000"):
        ChunkForm.of(ChunkNames(), "m", share_rank(8, 0, 2), whole, 1 << 10, of_share=share)


def test_workers_of_other_sizes_that_hold_a_share() -> None:
    def spans(first: int, held: int, shares: int = 8) -> list[tuple[int, int]]:
        found = overlapping_ranks(share_rank(shares, first, held))
        own = [held_ranks(each) for each in found]
        assert all(set(each) & set(held_ranks(share_rank(shares, first, held))) for each in own)
        return [(each[0] >> 16 & 0xFF, len(each)) for each in own]

    assert spans(5, 1) == [(5, 1), (4, 2), (4, 4), (0, 8)]
    assert spans(4, 2) == [(4, 1), (5, 1), (4, 2), (4, 4), (0, 8)]
    assert len(spans(0, 8)) == 8 + 4 + 2 + 1
    assert spans(0, 1, 1) == [(0, 1)]
    # Three stages of four shares: no rank holds shares of two, but that costs nothing.
    assert {(4, 4), (4, 2), (5, 1)} <= set(spans(5, 1, 12))


def test_a_share_is_cut_as_a_chunk_of_its_size_is() -> None:
    alone = ChunkForm.of(ChunkNames(bytes(32)), "model", 0, opaque_pages(SIZE), 1 << 10)
    assert alone.stripe_sizes[-1] < alone.stripe_sizes[0], "the last one is shorter"
    for held in (1, 2, 4):
        assert form(0, held).stripe_sizes == alone.stripe_sizes * held
        assert form(0, held).stripe_payload_bytes == alone.stripe_payload_bytes
        assert form(0, held).frame(NAME).stripe_count == alone.stripe_count, "of the first"


def test_a_share_is_told_from_the_others() -> None:
    """Of several the first one."""
    forms = (form(0, 1), form(2, 1), LOW, HIGH, PLAIN)
    assert [each.frame(NAME).share for each in forms] == [1, 3, 1, 3, 0]


def test_keys_of_shares_differ_in_their_rank_alone() -> None:
    keys = ShareKeys(PREFIX)
    alone = [form(number, 1).key(NAME) for number in range(SHARES)]
    assert keys.of(WHOLE.key(NAME)) == alone
    assert keys.of(HIGH.key(NAME)) == alone[2:]
    assert keys.first(HIGH.key(NAME)) == alone[2]
    for key in (*alone, WHOLE.names.common, PREFIX, b""):
        assert [*keys.of(key)] == [key]
        assert keys.first(key) is key
    assert keys.first_of_each(alone) is alone
    mixed = [alone[1], HIGH.key(NAME), PREFIX]
    assert keys.first_of_each(mixed) == [alone[1], alone[2], PREFIX]
    # Also of what begins keys.
    assert keys.of(HIGH.stem(32)) == [form(number, 1).stem(32) for number in (2, 3)]


def test_who_has_a_share() -> None:
    keys, alone = ShareKeys(PREFIX), form(2, 1).key(NAME)
    assert [*keys.holders(alone)] == [alone, HIGH.key(NAME), WHOLE.key(NAME)]
    # Ranks whose nodes are not one node are no shares, though they look like some.
    random = Random(3)
    for rank in (0x0402_0200, 0x0203_0203, 0, 0xFFFF_FFFF, *map(random.getrandbits, [32] * 300)):
        plain = ChunkForm.of(ChunkNames(bytes(32), PREFIX), "m", rank, opaque_pages(9), 1 << 10)
        held = keys.holders(plain.key(NAME))
        assert plain.key(NAME) in held
    for odd in (b"", PREFIX, PREFIX + b"lmcr2:", b"\xff" * 60):
        assert odd in keys.holders(odd)


def test_what_one_size_has_stored_another_loads(tier: SharingTier) -> None:
    write = store(tier, LOW, payload(0, 2))
    assert write.stored_bytes == 0, "a tier that counts none"
    assert load(tier, WHOLE)[0] is ReadOutcome.MISSING, "the others may be on their way"
    assert load(tier, HIGH)[0] is ReadOutcome.MISSING
    store(tier, HIGH, payload(2, 2))
    assert load(tier, WHOLE) == (ReadOutcome.LOADED, payload(0, 4))
    for number in range(SHARES):
        assert load(tier, form(number, 1)) == (ReadOutcome.LOADED, payload(number, 1))


@pytest.mark.parametrize("damaged", range(SHARES))
def test_a_chunk_is_as_good_as_its_worst_share(tier: SharingTier, damaged: int) -> None:
    store(tier, WHOLE, payload(0, 4))
    memory = tier.tier
    assert isinstance(memory, MemoryTier)
    memory.damaged.add(form(damaged, 1).key(NAME))
    assert load(tier, WHOLE)[0] is ReadOutcome.CORRUPT
    others = LOW if damaged > 1 else HIGH
    assert load(tier, others)[0] is ReadOutcome.LOADED
    memory.reason = "it was taken down"
    assert load(tier, others)[0] is ReadOutcome.UNAVAILABLE


def refresh(tier: SharingTier, forms: Sequence[ChunkForm], claim_s: float) -> ExistsResult:
    found: list[ExistsResult] = []
    chunks = [(each.key(NAME), each.stripe_count) for each in forms]
    tier.refresh(chunks, time.monotonic() + 30.0, found.append, claim_s)
    return ExistsResult(found[0].outcome, [*found[0].present], [*found[0].claimed])


def test_a_writer_claims_all_shares_or_none(tier: SharingTier) -> None:
    assert refresh(tier, [HIGH], 60.0).claimed == [True]
    # Another size: two of the four are claimed, so it gives the other two back.
    assert refresh(tier, [WHOLE], 60.0)[1:] == ([False], [False])
    assert refresh(tier, [LOW, WHOLE], 60.0)[1:] == ([False] * 2, [True, False])
    tier.unclaim([HIGH.key(NAME), LOW.key(NAME)])
    assert refresh(tier, [WHOLE], 60.0).claimed == [True]


def test_a_chunk_is_there_with_its_last_share(tier: SharingTier) -> None:
    for number in range(SHARES):
        assert refresh(tier, [WHOLE], 0.0).present == [False]
        assert tier.lookup(HIGH.key(NAME)) is False
        store(tier, form(number, 1), payload(number, 1))
    assert refresh(tier, [WHOLE, LOW, HIGH], 0.0).present == [True] * 3
    assert all(tier.lookup(each.key(NAME)) for each in (WHOLE, LOW, HIGH, form(3, 1)))


def test_who_asks_whether_a_chunk_is_whole_is_told_of_all_shares(tier: SharingTier) -> None:
    store(tier, LOW, payload(0, 2))
    found: list[ExistsResult] = []
    keys = [each.key(NAME) for each in (LOW, WHOLE, HIGH)]
    tier.exists(keys, time.monotonic() + 30.0, found.append)
    tier.exist_whole(keys, time.monotonic() + 30.0, found.append)
    assert [[*each.present] for each in found] == [[True, True, False], [True, False, False]]


class Noted(MemoryTier):
    """Ends loads when it is told to, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: Sequence[ChunkIO] = ()
        self.cancelled: list[ChunkIO] = []
        self.removed: list[tuple[bytes, int, int | None]] = []

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        self.jobs, self.end = jobs, done

    def store_all(self, jobs: Sequence[ChunkIO], done: WriteDone, /) -> None:
        self.jobs = jobs
        for each in jobs:
            each.stored_bytes = 7
        super().store_all(jobs, done)

    def cancel(self, job: ChunkIO, /) -> None:
        self.cancelled.append(job)

    def remove(
        self,
        key: bytes,
        deadline: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        self.removed.append((key, stripe_count, newest_unix_ms))
        outcome = CallOutcome.DONE if len(self.removed) == 1 else CallOutcome.TIMED_OUT
        done(RemoveResult(outcome, 1, 3))


def test_a_share_that_is_missing_ends_the_loads_of_the_others() -> None:
    inside, ended = Noted(), list[tuple[ChunkIO, ReadOutcome]]()
    tier, whole = SharingTier(inside, PREFIX), job(WHOLE)
    tier.load_all([whole], lambda *end: ended.append(end))
    shares = [*inside.jobs]
    for each in shares[:2]:
        inside.end(each, ReadOutcome.LOADED)
    assert not inside.cancelled
    inside.end(shares[2], ReadOutcome.MISSING)
    assert inside.cancelled == shares
    assert not ended, "its slots are still in use"
    inside.end(shares[3], ReadOutcome.CANCELLED)
    assert ended == [(whole, ReadOutcome.MISSING)]
    assert inside.cancelled == shares, "once"
    tier.cancel(whole)
    assert inside.cancelled[4:] == [whole], "what has ended is not kept"


def test_a_share_that_fails_after_another_cancels_nothing_again() -> None:
    inside = Noted()
    SharingTier(inside, PREFIX).load_all([job(WHOLE)], lambda *_: None)
    for each in inside.jobs[:2]:
        inside.end(each, ReadOutcome.MISSING)
    assert inside.cancelled == inside.jobs


def test_each_share_is_stored_as_the_share_that_it_is() -> None:
    inside = Noted()
    tier = SharingTier(inside, PREFIX)
    write = store(tier, HIGH, payload(2, 2))
    # The first one, by which a chunk is found, is sent last.
    assert [each.frame.share for each in inside.jobs] == [4, 3]
    assert write.stored_bytes == 14
    tier.cancel(write)
    assert inside.cancelled == [write], "what has ended is not kept"


def test_a_removal_is_one_of_all_shares() -> None:
    inside, found = Noted(), list[RemoveResult]()
    tier = SharingTier(inside, PREFIX)
    tier.remove(HIGH.key(NAME), 1.0, found.append, 6, 77)
    low, high = (form(number, 1).key(NAME) for number in (2, 3))
    assert inside.removed == [(low, 3, 77), (high, 3, 77)]
    assert found == [RemoveResult(CallOutcome.TIMED_OUT, 2, 6)], "one may still be there"
    tier.remove(low, 1.0, found.append)
    assert inside.removed[2:] == [(low, 0, None)]


@pytest.mark.parametrize("plain", [PLAIN, form(1, 1)])
def test_what_has_no_shares_is_passed_on_as_it_is(plain: ChunkForm) -> None:
    inside = Noted()
    tier = SharingTier(inside, PREFIX)
    jobs = [job(plain, payload(1, 1))]
    tier.store_all(jobs, lambda *_: None)
    assert inside.jobs is jobs
    tier.load_all(jobs, lambda *_: None)
    assert inside.jobs is jobs
    assert refresh(tier, [plain], 60.0).present == [True]
    # Beside some that have.
    ended: list[ChunkIO] = []
    mixed = [job(plain), job(HIGH)]
    tier.store_all(mixed, lambda each, _: ended.append(each))
    assert ended == mixed
    tier.load_all(mixed, lambda each, _: ended.append(each))
    for each in inside.jobs:
        inside.end(each, ReadOutcome.LOADED)
    assert ended[2:] == mixed


class TestContractInShares(contracts.InShares, contracts.TestMemoryTier):
    @contextmanager
    def opened(self) -> Iterator[Tier]:
        with super().opened() as tier:
            yield SharingTier(tier)

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return super().stalled(self.inside(tier))

    def damage(self, tier: Tier, key: bytes) -> None:
        super().damage(self.inside(tier), ShareKeys().of(key)[3])


class TestContractInSharesWithoutIndex(TestContractInShares):
    has_index = False
