# SPDX-License-Identifier: Apache-2.0
"""The contract that ships, on the tiers that do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.sharing import SharingTier
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.chunks.names import (
    ChunkForm,
    ChunkNames,
    ShareKeys,
    opaque_pages,
    stripe_key,
)
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.testing import tier_contract
from lmcache_redis.testing.memory_tier import MemoryTier
from lmcache_redis.testing.tier_contract import PATIENCE_S, TierContract
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Done,
    ExistsResult,
    ReadDone,
    ReadOutcome,
    RemoveResult,
    Tier,
    WriteOutcome,
)
from tests.servers import RedisServer
from tests.testing.objects import ObjectTier


class TestMemoryTier(TierContract):
    has_index = True

    @contextmanager
    def opened(self) -> Iterator[Tier]:
        yield MemoryTier(has_index=self.has_index)

    @contextmanager
    def stalled(self, tier: Tier) -> Iterator[None]:
        assert isinstance(tier, MemoryTier)
        tier.reason = "it was taken down"
        yield
        tier.reason = ""

    def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.damaged.add(key)


class TestMemoryTierWithoutIndex(TestMemoryTier):
    has_index = False


class _LoadsOtherFrames(MemoryTier):
    def _load(self, job: ChunkIO) -> ReadOutcome:
        return ReadOutcome.LOADED if job.key in self._chunks else ReadOutcome.MISSING


class _AnswersTwice(MemoryTier):
    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone, /) -> None:
        super().load_all(jobs, done)
        threading.Timer(0.02, super().load_all, (jobs, done)).start()


class _CallsItAbsent(MemoryTier):
    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        done(ExistsResult(CallOutcome.DONE, [not self.reason and k in self._chunks for k in keys]))


class _KeepsWhatIsRemoved(MemoryTier):
    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult], *how: Any) -> None:
        done(RemoveResult(CallOutcome.DONE, 1))


class _ClearsEverything(MemoryTier):
    def clear(
        self, key_prefixes: Sequence[bytes], deadline: float, done: Done[RemoveResult]
    ) -> None:
        super().clear([b""], deadline, done)


class _KeepsSlots(MemoryTier):
    """Stores what the slots have a little later."""

    def _store(self, job: ChunkIO) -> WriteOutcome:
        outcome = super()._store(job)
        threading.Timer(0.02, super()._store, (job,)).start()
        return outcome


class _ClaimsForAll(MemoryTier):
    def refresh(
        self,
        chunks: Sequence[tuple[bytes, int]],
        deadline: float,
        done: Done[ExistsResult],
        claim_s: float = 0.0,
    ) -> None:
        present = [key in self._chunks for key, _ in chunks]
        done(ExistsResult(CallOutcome.DONE, present, [True] * len(chunks)))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (_LoadsOtherFrames, "test_another_frame_is_never_loaded"),
        (_LoadsOtherFrames, "test_damaged_bytes_are_never_loaded"),
        (_LoadsOtherFrames, "test_nothing_begins_after_its_deadline"),
        (_AnswersTwice, "test_a_chunk_comes_back_as_it_was"),
        (_CallsItAbsent, "test_one_answer_each_while_nothing_answers"),
        (_KeepsWhatIsRemoved, "test_what_was_removed_is_not_found"),
        (_ClearsEverything, "test_a_clear_removes_what_begins_so"),
        (_KeepsSlots, "test_a_cancelled_store_is_whole_or_not_there"),
        (_ClaimsForAll, "test_a_claim_is_given_once_and_can_be_given_back"),
    ],
)
def test_a_broken_promise_is_found(broken: type[MemoryTier], test: str) -> None:
    class Tests(TestMemoryTier):
        @contextmanager
        def opened(self) -> Iterator[Tier]:
            yield broken()

    with pytest.raises(AssertionError):
        getattr(Tests(), test)()


@pytest.mark.servers
class TestDiskTier(TierContract):
    @pytest.fixture(autouse=True)
    def in_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "tier"

    @contextmanager
    def opened(self) -> Iterator[Tier]:
        tier = DiskTier(self.directory, 64 << 20, read_patience_s=1.0, write_nice=0)
        try:
            yield tier
        finally:
            assert tier.close(PATIENCE_S)

    @contextmanager
    def stalled(self, tier: Tier) -> Iterator[None]:
        """FIFOs in place of files: to open one for reading hangs."""
        paths = self._files()
        for path in paths:
            path.rename(path.with_suffix(".aside"))
            os.mkfifo(path)
        yield
        for path in paths:
            aside = path.with_suffix(".aside")
            fifo = os.open(path, os.O_RDWR)
            aside.rename(path)
            os.close(fifo)  # who has waited reads its end

    def damage(self, tier: Tier, key: bytes) -> None:
        *_, path = sorted(self._files())
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes((last[0] ^ 1,)))

    def _files(self) -> list[Path]:
        return [
            path for path in self.directory.rglob("*") if path.is_file() and self.is_chunk(path)
        ]

    def is_chunk(self, path: Path) -> bool:
        return path.suffix == ".lmcr"


@pytest.mark.servers
class TestObjectTier(TestDiskTier):
    """In files, through fsspec."""

    @contextmanager
    def opened(self) -> Iterator[Tier]:
        tier = ObjectTier(f"file://{self.directory}", read_patience_s=1.0)
        try:
            yield tier
        finally:
            assert tier.close(PATIENCE_S)

    def is_chunk(self, path: Path) -> bool:
        return path.suffix == ""


class TestObjectTierInMemory(TierContract):
    """In fsspec's own memory."""

    @contextmanager
    def opened(self) -> Iterator[Tier]:
        self.url = f"memory://{os.urandom(8).hex()}"
        self.fs = fsspec.filesystem("memory")
        tier = ObjectTier(self.url, read_patience_s=1.0)
        try:
            yield tier
        finally:
            assert tier.close(PATIENCE_S)

    @contextmanager
    def stalled(self, tier: Tier) -> Iterator[None]:
        answers = threading.Event()
        cat_file = type(self.fs).cat_file

        def hang_and_cat(*call: Any, **named: Any) -> Any:
            assert answers.wait(PATIENCE_S)
            return cat_file(*call, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(self.fs), "cat_file", hang_and_cat)
            yield
            answers.set()

    def damage(self, tier: Tier, key: bytes) -> None:
        path = f"{self.url}/{key.hex()}"
        found = bytearray(self.fs.cat_file(path))
        found[-1] ^= 1
        self.fs.pipe_file(path, bytes(found))


@pytest.mark.servers
class TestRedisPlane(TierContract):
    @pytest.fixture(autouse=True)
    def with_server(self, tmp_path: Path) -> Iterator[None]:
        with RedisServer(tmp_path) as self.server:
            yield

    @contextmanager
    def opened(self) -> Iterator[Tier]:
        plane = RedisPlane(RedisOptions(self.server.unix_url, op_timeout_s=0.5))
        plane.start()
        try:
            assert plane.wait_probed(PATIENCE_S).up
            yield plane
        finally:
            assert plane.close(PATIENCE_S)

    @contextmanager
    def stalled(self, tier: Tier) -> Iterator[None]:
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def damage(self, tier: Tier, key: bytes) -> None:
        with self.server.client() as client:
            client.setrange(stripe_key(key, 1), 1000, b"damaged")


def form_in_shares(
    model_name: str, *, fingerprint: bytes = bytes(range(32)), chunk_bytes: int = 200_000
) -> ChunkForm:
    """Four shares, the third to the sixth of eight, in several stripes each."""
    names, share = ChunkNames(fingerprint), opaque_pages(chunk_bytes // 4)
    whole, kv_rank = opaque_pages(chunk_bytes), share_rank(8, 2, 4)
    return ChunkForm.of(names, model_name, kv_rank, whole, 1 << 14, of_share=share)


class InShares(TierContract):
    """Chunks that the tier behind has as shares. `tests.cache.test_sharing` has one in memory."""

    @pytest.fixture(autouse=True)
    def in_shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tier_contract, "form_of", form_in_shares)
        monkeypatch.setattr(tier_contract, "_FORM", form_in_shares("model"))

    def test_chunks_are_described_and_listed(self) -> None:
        with self.opened() as tier:
            form = form_in_shares("model")
            chunk = tier_contract._stored(tier, form)
            (frame,) = tier_contract._answer(tier.describe, [chunk.key], _soon()).frames
            assert (frame.chunk_hash, frame.chunk_bytes) == (chunk.name, 50_000), "of a share"
            assert tier.keys(form.stem(32), _soon(), 100).keys == [chunk.key]

    def inside(self, tier: Tier) -> Tier:
        assert isinstance(tier, SharingTier)
        return tier.tier


class TestSharesOnDisk(InShares, TestDiskTier):
    @contextmanager
    def opened(self) -> Iterator[Tier]:
        with super().opened() as tier:
            yield SharingTier(tier)


@pytest.mark.servers
class TestSharesInObjects(InShares, TestObjectTier):
    @contextmanager
    def opened(self) -> Iterator[Tier]:
        with super().opened() as tier:
            yield SharingTier(tier)


@pytest.mark.servers
class TestSharesInRedis(InShares, TestRedisPlane):
    @contextmanager
    def opened(self) -> Iterator[Tier]:
        with super().opened() as tier:
            yield SharingTier(tier)

    def damage(self, tier: Tier, key: bytes) -> None:
        super().damage(tier, ShareKeys().of(key)[1])


def _soon() -> float:
    return time.monotonic() + PATIENCE_S
