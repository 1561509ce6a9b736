# SPDX-License-Identifier: Apache-2.0
"""The threads of a disk tier: cancels, its end, a slow start, and a disk that does not answer.

The contract of `tiers` has tests of its own (`tests.testing`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.cache import blocking
from lmcache_redis.cache.disk.files import ChunkFiles, Scan
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem
from lmcache_redis.tiers import CallOutcome, ChunkIO, ReadOutcome, Tier, WriteOutcome
from tests.harness import wait_until

CHUNK_BYTES = 10_000
METADATA = RemoteMetadata(CHUNK_BYTES, [(CHUNK_BYTES,)], ["uint8"], MemoryFormat.PAGES)
PREFIX = key_stem(b"n" * 16, "model", 0, 8)


def key_of(number: int) -> bytes:
    return PREFIX + hash_tag(number.to_bytes(8, "big"))


def payload_of(number: int) -> bytes:
    return bytes([number % 251]) * CHUNK_BYTES


class Job:
    """A job and the callbacks that the tier made for it, in order."""

    def __init__(
        self, number: int, *, payload: bytes = bytes(CHUNK_BYTES), stripe_bytes: int = 4096
    ) -> None:
        chunk_hash, metadata = number.to_bytes(8, "big"), METADATA.serialize()
        frame = ChunkFrame(b"f" * 32, chunk_hash, CHUNK_BYTES, stripe_bytes, metadata)
        self.payload = bytearray(payload)
        view = memoryview(self.payload)
        slots = [view[at : at + stripe_bytes] for at in range(0, CHUNK_BYTES, stripe_bytes)]
        self.io = ChunkIO(key_of(number), frame, slots, math.inf, tag=self)
        self.said: list[Any] = []


def said(io: ChunkIO, outcome: object) -> None:
    assert isinstance(io.tag, Job)
    io.tag.said.append(outcome)


def read(tier: Tier, *jobs: Job) -> None:
    tier.load_all([job.io for job in jobs], said)


def write(tier: Tier, *jobs: Job) -> None:
    tier.store_all([job.io for job in jobs], said)


def ended(*jobs: Job) -> list[Any]:
    wait_until(lambda: all(job.said for job in jobs))
    return [job.said for job in jobs]


def stored(tier: Tier, *numbers: int) -> None:
    jobs = [Job(number, payload=payload_of(number)) for number in numbers]
    write(tier, *jobs)
    assert ended(*jobs) == [[WriteOutcome.STORED]] * len(jobs)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.lmcr"))


@pytest.fixture
def patience_s() -> float:
    """Long, so that a slow machine does not look like a hung disk."""
    return 60.0


disk_hangs = pytest.mark.parametrize("patience_s", [1.0])


@pytest.fixture
def tier(directory: Path, patience_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    monkeypatch.setattr(blocking, "PATIENCE_S", patience_s)
    tier = DiskTier(directory, 1 << 20, read_patience_s=patience_s)
    yield tier
    tier.close(10)


def answer(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    answers: list[Any] = []
    ask(answers.append)
    wait_until(lambda: answers)
    (given,) = answers
    return given


def test_chunks_come_back_in_slots_of_any_cut(tier: DiskTier, directory: Path) -> None:
    assert tier.name == "disk"
    assert tier.state.up
    assert tier.state.probed
    stored(tier, 1, 2, 3)
    assert len(files(directory)) == 3
    jobs = [Job(1), Job(2, stripe_bytes=CHUNK_BYTES), Job(3, stripe_bytes=64)]
    read(tier, *jobs)
    assert ended(*jobs) == [[ReadOutcome.LOADED]] * 3
    assert [job.payload for job in jobs] == [payload_of(number) for number in (1, 2, 3)]


class Gate:
    """Lets no call of a method go on until it is opened; counts those that came and returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.opened = threading.Event()
        self.entered = self.returned = 0
        method = getattr(owner, name)

        def wait_and_call(*call: Any) -> Any:
            self.entered += 1
            assert self.opened.wait(30)
            result = method(*call)
            self.returned += 1
            return result

        monkeypatch.setattr(owner, name, wait_and_call)


GateOf = Callable[[object, str], Gate]


@pytest.fixture
def gate_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[GateOf]:
    gates: list[Gate] = []

    def gate_of(owner: object, name: str) -> Gate:
        gates.append(Gate(monkeypatch, owner, name))
        return gates[-1]

    yield gate_of
    for gate in gates:
        gate.opened.set()


@pytest.fixture
def gate(gate_of: GateOf) -> Gate:
    """Of writes of files."""
    return gate_of(ChunkFiles, "write")


def test_a_cancel_ends_a_job_at_once_and_hides_its_write(directory: Path, gate: Gate) -> None:
    tier = DiskTier(directory, 1 << 20)
    jobs = [Job(number) for number in range(3)]
    write(tier, *jobs)
    wait_until(lambda: gate.entered)
    for job in jobs[:2]:
        tier.cancel(job.io)
        tier.cancel(job.io)
    cancelled, kept = [WriteOutcome.CANCELLED], [WriteOutcome.STORED]
    assert [job.said for job in jobs] == [cancelled, cancelled, []]
    gate.opened.set()
    assert ended(*jobs) == [cancelled, cancelled, kept]
    assert [tier.lookup(job.io.key) for job in jobs] == [False, False, True]
    assert len(files(directory)) == 1
    tier.cancel(jobs[2].io)
    assert tier.close(10)
    assert [len(job.said) for job in jobs] == [1, 1, 1]


def test_a_job_whose_deadline_passes_in_the_queue_is_not_begun(directory: Path, gate: Gate) -> None:
    tier = DiskTier(directory, 1 << 20)
    first, late = Job(1), Job(2)
    late.io.deadline = time.monotonic() + 0.05
    write(tier, first, late)
    time.sleep(0.06)
    gate.opened.set()
    assert ended(first, late) == [[WriteOutcome.STORED], [WriteOutcome.TIMED_OUT]]
    assert tier.close(10)


def test_close_lets_writes_finish(directory: Path) -> None:
    tier = DiskTier(directory, 1 << 20)
    jobs = [Job(number) for number in range(20)]
    write(tier, *jobs)
    assert tier.close(60)
    assert tier.close(60)
    assert [job.said for job in jobs] == [[WriteOutcome.STORED]] * 20
    late = [Job(1), Job(2)]
    read(tier, late[0])
    write(tier, late[1])
    assert [job.said for job in late] == [[ReadOutcome.CANCELLED], [WriteOutcome.CANCELLED]]
    assert answer(lambda done: tier.clear([b""], 0, done)).outcome is CallOutcome.CANCELLED
    assert DiskTier(directory, 1 << 20).close(1)


def test_close_ends_every_job_in_its_time(directory: Path, gate: Gate) -> None:
    tier = DiskTier(directory, 1 << 20)
    jobs = [Job(number) for number in range(3)]
    write(tier, *jobs)
    wait_until(lambda: gate.entered)
    assert not tier.close(0.1)
    assert [job.said for job in jobs] == [[WriteOutcome.CANCELLED]] * 3
    gate.opened.set()


# ------------------------------------------------------------------ the start


@pytest.fixture
def slow_scan(directory: Path, gate_of: GateOf) -> Gate:
    """Of looks at files, in a directory with four chunks."""
    tier = DiskTier(directory, 1 << 20)
    stored(tier, *range(4))
    assert tier.close(10)
    return gate_of(Scan, "_look_at")


def test_a_tier_is_down_while_its_files_are_read(
    directory: Path, slow_scan: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tier = DiskTier(directory, 1 << 20, in_background=True)
    wait_until(lambda: slow_scan.entered)
    assert (tier.state.up, tier.state.reason) == (False, "its files are being read")
    jobs = [Job(1), Job(9)]
    read(tier, jobs[0])
    write(tier, jobs[1])
    assert [job.said for job in jobs] == [[ReadOutcome.UNAVAILABLE], [WriteOutcome.UNAVAILABLE]]
    assert not tier.lookup(key_of(1))
    slow_scan.opened.set()
    wait_until(lambda: tier.state.up)
    assert tier.state.reason == ""
    assert [tier.lookup(key_of(number)) for number in range(4)] == [True] * 4
    stored(tier, 9)
    assert "the disk tier is up: it has 4 chunks" in caplog.text
    assert tier.close(10)
    assert len(files(directory)) == 5


def test_a_start_that_is_stopped_looks_at_no_more_files(directory: Path, slow_scan: Gate) -> None:
    tier = DiskTier(directory, 1 << 20, in_background=True)
    wait_until(lambda: slow_scan.entered)
    threading.Timer(0.05, slow_scan.opened.set).start()
    assert tier.close(30)
    assert slow_scan.entered == 1
    assert len(files(directory)) == 4
    again = DiskTier(directory, 1 << 20)
    assert all(again.lookup(key_of(number)) for number in range(4))
    assert again.close(10)


def test_a_directory_that_cannot_be_read_leaves_the_tier_down(
    directory: Path, slow_scan: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Scan, "_look_at", fail)
    tier = DiskTier(directory, 1 << 20, in_background=True)
    wait_until(lambda: "cannot be read" in tier.state.reason)
    assert not tier.state.up
    assert tier.close(30)
    assert len(files(directory)) == 4


# ------------------------------------------------------------------ a disk that hangs


@disk_hangs
def test_a_hung_write_drops_what_waits(tier: DiskTier, gate: Gate) -> None:
    jobs = [Job(number) for number in range(3)]
    write(tier, *jobs)
    wait_until(lambda: not tier.state.up)
    assert "a write has not returned" in tier.state.reason
    assert ended(*jobs) == [[WriteOutcome.UNAVAILABLE]] * 3
    gate.opened.set()
    wait_until(lambda: tier.state.up)
    assert not tier.lookup(key_of(0)), "its owner may have replaced it since"
    assert [len(job.said) for job in jobs] == [1] * 3
    stored(tier, 1)


def test_a_read_in_flight_that_is_cancelled_is_dropped(tier: DiskTier, gate_of: GateOf) -> None:
    stored(tier, 1)
    gate = gate_of(tier.store, "load")
    cancelled = Job(1)
    read(tier, cancelled)
    wait_until(lambda: gate.entered)
    tier.cancel(cancelled.io)
    assert cancelled.said == [ReadOutcome.CANCELLED]
    gate.opened.set()
    wait_until(lambda: gate.returned)
    last = Job(1)
    read(tier, last)
    assert ended(last, cancelled) == [[ReadOutcome.LOADED], [ReadOutcome.CANCELLED]]
    assert cancelled.payload == bytes(CHUNK_BYTES)
    assert tier.state.up


def test_what_is_written_is_what_the_slots_had_at_first(tier: DiskTier, gate: Gate) -> None:
    """The file is written from a copy: a late one does not see what the slots hold by then."""
    job = Job(1, payload=payload_of(1))
    write(tier, job)
    wait_until(lambda: gate.entered)
    job.payload[:] = payload_of(2)
    gate.opened.set()
    assert ended(job) == [[WriteOutcome.STORED]]
    again = Job(1)
    read(tier, again)
    assert ended(again) == [[ReadOutcome.LOADED]]
    assert again.payload == payload_of(1)


@disk_hangs
def test_a_clear_that_hangs_goes_on_when_the_disk_is_back(
    tier: DiskTier, directory: Path, gate_of: GateOf
) -> None:
    stored(tier, *range(5))
    gate = gate_of(ChunkFiles, "remove")
    unavailable = CallOutcome.UNAVAILABLE
    assert answer(lambda done: tier.clear([PREFIX], math.inf, done)).outcome is unavailable
    assert "a removal has not returned" in tier.state.reason
    assert answer(lambda done: tier.clear([PREFIX], math.inf, done)).outcome is unavailable
    gate.opened.set()
    wait_until(lambda: not files(directory))
    assert tier.store.used_bytes == 0


@disk_hangs
def test_a_hung_tier_is_closed_without_waiting(tier: DiskTier, gate: Gate) -> None:
    jobs = [Job(number) for number in range(2)]
    write(tier, *jobs)
    wait_until(lambda: not tier.state.up)
    started_s = time.monotonic()
    assert not tier.close(600)
    assert time.monotonic() - started_s < 60
    assert ended(*jobs) == [[WriteOutcome.UNAVAILABLE]] * 2
