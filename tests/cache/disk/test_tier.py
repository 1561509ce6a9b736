# SPDX-License-Identifier: Apache-2.0
"""The disk tier against the contract of `tiers`, and with a disk that does not answer.

Files are replaced by FIFOs: opening one for reading blocks until it is opened for writing, as on an
NFS server that is gone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    ExistsResult,
    ReadOutcome,
    RemoveResult,
    ScanResult,
    Tier,
    WriteOutcome,
)
from tests.harness import wait_until

CHUNK_BYTES = 10_000
METADATA = RemoteMetadata(CHUNK_BYTES, [(CHUNK_BYTES,)], ["uint8"], MemoryFormat.PAGES)
PREFIX = key_stem(b"n" * 16, "model", 0, 8)


def key_of(number: int, prefix: bytes = PREFIX) -> bytes:
    return prefix + hash_tag(number.to_bytes(8, "big"))


def payload_of(number: int) -> bytes:
    return bytes([number % 251]) * CHUNK_BYTES


class Job:
    """A job and the callbacks that the tier made for it, in order."""

    def __init__(
        self,
        number: int,
        *,
        payload: bytes = bytes(CHUNK_BYTES),
        key: bytes | None = None,
        stripe_bytes: int = 4096,
        deadline: float = math.inf,
        fingerprint: bytes = b"f" * 32,
        metadata: RemoteMetadata = METADATA,
    ) -> None:
        chunk_hash = number.to_bytes(8, "big")
        frame = ChunkFrame(fingerprint, chunk_hash, CHUNK_BYTES, stripe_bytes, metadata.serialize())
        self.payload = bytearray(payload)
        view = memoryview(self.payload)
        slots = [view[at : at + stripe_bytes] for at in range(0, CHUNK_BYTES, stripe_bytes)]
        self.io = ChunkIO(key or key_of(number), frame, slots, deadline, tag=self)
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
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


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


# ------------------------------------------------------------------ the contract


def test_chunks_come_back_in_slots_of_any_cut(tier: DiskTier, directory: Path) -> None:
    contract: Tier = tier
    assert contract.name == "disk"
    assert contract.state.up
    assert contract.state.probed
    stored(tier, 1, 2, 3)
    assert len(files(directory)) == 3
    jobs = [Job(1), Job(2, stripe_bytes=CHUNK_BYTES), Job(3, stripe_bytes=64)]
    read(tier, *jobs)
    assert ended(*jobs) == [[ReadOutcome.LOADED]] * 3
    assert [job.payload for job in jobs] == [payload_of(number) for number in (1, 2, 3)]


def test_what_is_there(tier: DiskTier) -> None:
    stored(tier, 1, 2, 4)
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert [tier.lookup(key) for key in keys] == [True, True, False, True]
    found = answer(lambda done: tier.exists(keys, math.inf, done))
    assert found == ExistsResult(CallOutcome.DONE, [True, True, False, True])
    assert answer(lambda done: tier.scan(keys, math.inf, done)) == ScanResult(CallOutcome.DONE, 2)
    missing = Job(3)
    read(tier, missing)
    assert ended(missing) == [[ReadOutcome.MISSING]]


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": b"g" * 32},
        {"metadata": RemoteMetadata(CHUNK_BYTES, [(5000, 2)], ["uint8"], MemoryFormat.PAGES)},
        {"metadata": RemoteMetadata(CHUNK_BYTES, [(5000,)], ["bfloat16"], MemoryFormat.PAGES)},
    ],
)
def test_a_chunk_of_another_frame_is_no_hit_and_stays(tier: DiskTier, other: Any) -> None:
    stored(tier, 1)
    foreign = Job(1, payload=payload_of(9), **other)
    read(tier, foreign)
    assert ended(foreign) == [[ReadOutcome.FOREIGN]]
    assert foreign.payload == payload_of(9)
    assert tier.lookup(key_of(1))


def test_damage_is_never_loaded(tier: DiskTier, directory: Path) -> None:
    stored(tier, 1)
    (path,) = files(directory)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    job = Job(1)
    read(tier, job)
    assert ended(job) == [[ReadOutcome.CORRUPT]]
    assert not tier.lookup(key_of(1))
    assert not path.exists()


def test_a_chunk_over_the_limit_is_answered(directory: Path) -> None:
    tier = DiskTier(directory, 8192)
    job = Job(1)
    write(tier, job)
    assert ended(job) == [[WriteOutcome.FULL]]
    assert tier.close(10)


def test_a_limit_that_is_lowered_holds_from_the_next_write_on(
    tier: DiskTier, directory: Path
) -> None:
    stored(tier, 1, 2, 3, 4)
    each_bytes = tier.store.used_bytes // 4
    tier.store.limit_bytes = 2 * each_bytes
    stored(tier, 5)
    assert tier.store.used_bytes == tier.store.limit_bytes == 2 * each_bytes
    assert [tier.lookup(key_of(n)) for n in (1, 2, 3, 4, 5)] == [False, False, False, True, True]
    tier.store.limit_bytes = 3 * each_bytes
    stored(tier, 6)
    assert len(files(directory)) == 3


def test_a_clear_takes_what_begins_so_and_nothing_else(tier: DiskTier, directory: Path) -> None:
    others = key_stem(b"n" * 16, "model 2", 0, 8)
    stored(tier, 1, 2, 300)
    write(tier, other := Job(1, key=key_of(1, others)))
    assert ended(other) == [[WriteOutcome.STORED]]
    cleared = answer(lambda done: tier.clear([PREFIX + hash_tag(bytes(7))[:-1]], math.inf, done))
    assert cleared == RemoveResult(CallOutcome.DONE, 2)
    assert len(files(directory)) == 2
    assert tier.lookup(key_of(300))
    cleared = answer(lambda done: tier.clear([PREFIX], math.inf, done))
    assert cleared == RemoveResult(CallOutcome.DONE, 1)
    assert tier.lookup(key_of(1, others))
    assert tier.store.used_bytes == 4096 * 4
    stored(tier, 1, 2)
    beginnings = [PREFIX, key_of(1, others)]
    cleared = answer(lambda done: tier.clear(beginnings, math.inf, done))
    assert cleared == RemoveResult(CallOutcome.DONE, 3)


class Gate:
    """Blocks writes of files until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = 0
        write = ChunkFiles.write

        def wait_and_write(*call: Any) -> None:
            self.entered += 1
            assert self.opened.wait(30)
            write(*call)

        monkeypatch.setattr(ChunkFiles, "write", wait_and_write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


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


def test_a_job_that_waits_past_its_deadline_is_not_begun(directory: Path, gate: Gate) -> None:
    tier = DiskTier(directory, 1 << 20)
    first, late = Job(1), Job(2, deadline=time.monotonic() + 0.05)
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


class SlowScan:
    """Looks at no file until `release` is set, and says how many it has looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.begun = threading.Event()
        self.looked_at = 0
        look_at = Scan._look_at

        def wait_and_look(scan: Scan, path: str) -> None:
            self.begun.set()
            assert self.release.wait(30)
            self.looked_at += 1
            look_at(scan, path)

        monkeypatch.setattr(Scan, "_look_at", wait_and_look)


@pytest.fixture
def slow_scan(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowScan]:
    """Of a directory with four chunks."""
    tier = DiskTier(directory, 1 << 20)
    stored(tier, *range(4))
    assert tier.close(10)
    slow = SlowScan(monkeypatch)
    yield slow
    slow.release.set()


def test_a_tier_is_down_while_its_files_are_read(
    directory: Path, slow_scan: SlowScan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tier = DiskTier(directory, 1 << 20, in_background=True)
    assert slow_scan.begun.wait(30)
    assert (tier.state.up, tier.state.reason) == (False, "its files are being read")
    jobs = [Job(1), Job(9)]
    read(tier, jobs[0])
    write(tier, jobs[1])
    assert [job.said for job in jobs] == [[ReadOutcome.UNAVAILABLE], [WriteOutcome.UNAVAILABLE]]
    assert not tier.lookup(key_of(1))
    slow_scan.release.set()
    wait_until(lambda: tier.state.up)
    assert tier.state.reason == ""
    assert [tier.lookup(key_of(number)) for number in range(4)] == [True] * 4
    stored(tier, 9)
    assert "the disk tier is up: it has 4 chunks" in caplog.text
    assert tier.close(10)
    assert len(files(directory)) == 5


def test_a_start_that_is_stopped_looks_at_no_more_files(
    directory: Path, slow_scan: SlowScan
) -> None:
    tier = DiskTier(directory, 1 << 20, in_background=True)
    assert slow_scan.begun.wait(30)
    threading.Timer(0.05, slow_scan.release.set).start()
    assert tier.close(30)
    assert slow_scan.looked_at == 1
    assert len(files(directory)) == 4
    again = DiskTier(directory, 1 << 20)
    assert all(again.lookup(key_of(number)) for number in range(4))
    assert again.close(10)


def test_a_directory_that_cannot_be_read_leaves_the_tier_down(
    directory: Path, slow_scan: SlowScan, monkeypatch: pytest.MonkeyPatch
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


class Hang:
    """FIFOs in place of files; a read of one hangs until `end`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        for path in paths:
            path.unlink()
            os.mkfifo(path)

    def end(self) -> None:
        for path in self._paths:
            os.close(os.open(path, os.O_RDWR))
            path.unlink(missing_ok=True)


@disk_hangs
def test_a_hung_read_takes_the_tier_down(tier: DiskTier, directory: Path) -> None:
    stored(tier, *range(4))
    hang = Hang(files(directory))
    jobs = [Job(number) for number in range(4)]
    read(tier, *jobs)
    wait_until(lambda: not tier.state.up)
    assert tier.state.reason == "a read has not returned within 1 s"
    wait_until(lambda: all(job.said for job in jobs))
    unavailable = [ReadOutcome.UNAVAILABLE]
    assert [job.said for job in jobs] == [unavailable] * 4

    # Down: nothing is found, and every job is answered at once.
    assert not tier.lookup(key_of(0))
    keys = [key_of(0)]
    unavailable_call = CallOutcome.UNAVAILABLE
    assert answer(lambda done: tier.exists(keys, 0, done)) == ExistsResult(unavailable_call)
    assert answer(lambda done: tier.scan(keys, 0, done)) == ScanResult(unavailable_call)
    late = [Job(1), Job(2)]
    read(tier, late[0])
    write(tier, late[1])
    assert [job.said for job in late] == [unavailable, [WriteOutcome.UNAVAILABLE]]

    hang.end()
    wait_until(lambda: tier.state.up)
    assert tier.state.reason == ""
    assert [len(job.said) for job in jobs] == [1] * 4
    stored(tier, 9)


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


def test_a_read_in_flight_that_is_cancelled_is_dropped(
    tier: DiskTier, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tier, 1)
    entered, release, returned = threading.Event(), threading.Event(), threading.Event()
    read_file = tier.store.load

    def hang_and_read(*call: Any) -> ReadOutcome:
        entered.set()
        assert release.wait(30)
        outcome = read_file(*call)
        returned.set()
        return outcome

    monkeypatch.setattr(tier.store, "load", hang_and_read)
    cancelled = Job(1)
    read(tier, cancelled)
    assert entered.wait(30)
    tier.cancel(cancelled.io)
    assert cancelled.said == [ReadOutcome.CANCELLED]
    release.set()
    assert returned.wait(30)
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
    tier: DiskTier, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tier, *range(5))
    release, remove = threading.Event(), ChunkFiles.remove

    def hang_and_remove(*call: Any) -> None:
        assert release.wait(30)
        remove(*call)

    monkeypatch.setattr(ChunkFiles, "remove", hang_and_remove)
    unavailable = CallOutcome.UNAVAILABLE
    assert answer(lambda done: tier.clear([PREFIX], math.inf, done)).outcome is unavailable
    assert "a removal has not returned" in tier.state.reason
    assert answer(lambda done: tier.clear([PREFIX], math.inf, done)).outcome is unavailable
    release.set()
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
