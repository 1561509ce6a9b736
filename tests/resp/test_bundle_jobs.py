"""A bundle by itself: its chunks end, leave and are cancelled in any order, each told once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_redis.resp import ChunkIO, ReadOutcome, WriteOutcome
from lmcache_redis.resp.bundles import TOGETHER_S, can_be_bundled
from lmcache_redis.resp.jobs import JobRegistry, Stop
from lmcache_redis.resp.readjob import ReadBundle
from lmcache_redis.resp.writejob import WriteBundle
from tests.resp.helpers import Chunk

SIZE = 4096


def test_what_can_be_bundled() -> None:
    now = time.monotonic()

    def io(chunk: Chunk, deadline: float = now) -> ChunkIO:
        return ChunkIO(chunk.key, chunk.frame, chunk.slots, deadline)

    one, other, long = Chunk(1, SIZE, SIZE), Chunk(2, 64, SIZE), Chunk(3, 2 * SIZE, SIZE)
    assert can_be_bundled([io(one), io(other)])
    assert can_be_bundled([io(one), io(other, now + TOGETHER_S / 2)])
    assert not can_be_bundled([io(one), io(other, now + 2 * TOGETHER_S)])
    assert not can_be_bundled([io(one)])
    assert not can_be_bundled([io(one), io(long)])


class Told:
    """A bundle of three, and what was said of each chunk."""

    def __init__(self, kind: type[ReadBundle | WriteBundle], within_s: float = 60.0) -> None:
        self.registry = JobRegistry()
        self.ios = [Chunk(n, SIZE, SIZE).io(within_s) for n in range(3)]
        self.answers: list[tuple[int, str]] = []
        self.removed: list[int] = []
        if kind is ReadBundle:
            self.bundle: ReadBundle | WriteBundle = ReadBundle(
                self.ios, self._done, lambda *_: None, lambda *_: None, self.registry
            )
        else:
            self.bundle = WriteBundle(
                self.ios, self._done, self._settled, lambda *_: None, self.registry, bytes(16)
            )
        self.registry.add((self.bundle,))

    def _done(self, io: ChunkIO, outcome: ReadOutcome | WriteOutcome) -> None:
        self.answers.append((self.ios.index(io), outcome.name))

    def _settled(self, io: ChunkIO, outcome: WriteOutcome, remains: bool) -> None:
        if remains:
            self.removed.append(self.ios.index(io))

    def check(self, expected: Sequence[tuple[int, str]]) -> None:
        assert self.answers == list(expected)
        assert self.registry.wait_empty(0) == (len(expected) == 3)


def test_an_early_end_waits_for_what_has_begun() -> None:
    told = Told(ReadBundle)
    bundle = told.bundle
    assert isinstance(bundle, ReadBundle)
    assert bundle.begin(0)
    assert bundle.begin(1)
    bundle.stop(Stop.CANCELLED)
    assert not bundle.begin(2)
    told.check([])
    bundle.moved([0], [bytes(16)])
    told.check([(0, "LOADED")])
    bundle.release()
    told.check([(0, "LOADED"), (1, "CANCELLED"), (2, "CANCELLED")])
    assert not bundle.begin(1)


def test_one_that_left_ends_with_the_others() -> None:
    told = Told(ReadBundle)
    job = told.bundle.single(1, begun=False)
    assert job.begin()
    told.bundle.stop(Stop.UNAVAILABLE)
    told.check([(0, "UNAVAILABLE"), (2, "UNAVAILABLE")])
    job.end()
    told.check([(0, "UNAVAILABLE"), (2, "UNAVAILABLE"), (1, "UNAVAILABLE")])


def test_one_that_left_is_stopped_where_that_was_decided_before() -> None:
    told = Told(ReadBundle)
    assert told.bundle.begin(1)
    told.bundle.stop(Stop.TIMED_OUT)
    told.check([])
    job = told.bundle.single(1, begun=True)
    told.check([(0, "TIMED_OUT"), (2, "TIMED_OUT")])
    assert job.ended
    job.release()
    told.check([(0, "TIMED_OUT"), (2, "TIMED_OUT"), (1, "TIMED_OUT")])


def test_one_that_was_answered_leaves_as_nobody() -> None:
    told = Told(ReadBundle)
    bundle = told.bundle
    assert isinstance(bundle, ReadBundle)
    assert bundle.begin(2)
    bundle.moved([2], [bytes(16)])
    job = bundle.single(2, begun=False)
    assert job.ended
    assert not job.begin()
    assert (job.key, job.frame) == (told.ios[2].key, told.ios[2].frame)
    told.check([(2, "LOADED")])
    for step in (0, 1):
        assert bundle.single(step, begun=False).begin()
    told.check([(2, "LOADED")])


def test_cancelling_one_waits_until_nothing_is_under_way() -> None:
    told = Told(ReadBundle)
    bundle = told.bundle
    assert isinstance(bundle, ReadBundle)
    assert bundle.begin(0)
    bundle.cancel(told.ios[0])
    bundle.cancel(told.ios[1])
    told.check([])
    bundle.release()
    told.check([(0, "CANCELLED"), (1, "CANCELLED")])
    bundle.cancel(told.ios[1])
    job = bundle.single(2, begun=False)
    bundle.cancel(told.ios[2])
    assert job.ended
    told.check([(0, "CANCELLED"), (1, "CANCELLED"), (2, "CANCELLED")])


def test_the_deadline_is_the_first_of_all() -> None:
    told = Told(ReadBundle, within_s=-1.0)
    assert not told.bundle.begin(0)
    told.check([(0, "TIMED_OUT"), (1, "TIMED_OUT"), (2, "TIMED_OUT")])


def two_of_three_sent() -> tuple[Told, WriteBundle]:
    told = Told(WriteBundle)
    bundle = told.bundle
    assert isinstance(bundle, WriteBundle)
    for step in (0, 1):
        assert bundle.begin(step)
    bundle.sent_all([0, 1])
    return told, bundle


def test_a_store_that_comes_late_changes_no_answer() -> None:
    told, bundle = two_of_three_sent()
    bundle.acknowledge_all([0])
    bundle.stop(Stop.TIMED_OUT)
    bundle.acknowledge_all([1])
    told.check([(0, "STORED"), (1, "TIMED_OUT"), (2, "TIMED_OUT")])


def test_what_was_sent_goes_on_alone() -> None:
    told, bundle = two_of_three_sent()
    job = bundle.single(0, begun=False)
    assert (job.key, job.store_id) == (told.ios[0].key, bytes(16))
    job.acknowledge()
    told.check([(0, "STORED")])
    bundle.stop(Stop.CANCELLED)
    told.check([(0, "STORED"), (1, "CANCELLED"), (2, "CANCELLED")])
    # Answered, and its reply still to come, or never: then its remains are to go.
    ended = bundle.single(1, begun=False)
    assert not ended.take_remains()
    ended.withdraw()
    assert ended.take_remains()
    assert told.removed == []
