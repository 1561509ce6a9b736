"""A job's surroundings, played: a device, and what it needs of the agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.fills import Fills
from lmcache_redis.agent.registration import Registration
from lmcache_redis.agent.retrieves import RetrieveJob
from lmcache_redis.agent.sessions import Tally
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.agent.timers import Timers
from lmcache_redis.hostpool import Entry, HostPool
from lmcache_redis.metrics import Metrics

BLOCKS_A_CHUNK = 2
STRIPES_A_CHUNK = 1
CHUNK_BYTES = 64
HASHES = [b"a", b"b", b"c", b"d", b"e"]


class Device:
    """Plays a GPU. ``during`` is run inside each call, after ``read`` where that is told."""

    def __init__(
        self, *, chunks_a_call: int = 1, during: Callable[[], None] = lambda: None
    ) -> None:
        self.call_bytes = chunks_a_call * CHUNK_BYTES
        self.on_host_cores = False
        self.during = during
        self.calls: list[tuple[int, list[int], list[str], int]] = []

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[str],
        stripe_bytes: int,
        event: bytes | None,
        read: Callable[[], None],
        until_ns: int,
        chunks: int,
        filled: Callable[[int], None] | None,
    ) -> None:
        assert filled is None, "one stripe a chunk: nothing goes before it is whole"
        self.calls.append((chunks, list(block_ids), list(slots), 0))
        read()
        self.during()

    def scatter(
        self,
        block_ids: Sequence[int],
        slots: Sequence[str],
        stripe_bytes: int,
        skip_blocks: int,
        event: bytes | None,
        until_ns: int,
        chunks: int,
    ) -> None:
        self.calls.append((chunks, list(block_ids), list(slots), skip_blocks))
        self.during()


class Played:
    """What a job needs of the agent: a host pool, copy threads, a session; and its answers."""

    def __init__(self, device: Any, *, slots: int = 8) -> None:
        self.pool, self.metrics = HostPool(slots), Metrics()
        self.copies, self.timers = CopyThreads(1), Timers()
        self.posted: list[Callable[[], None]] = []
        self.answers: list[Any] = []
        self.offered: list[bytes] = []
        self.session = SimpleNamespace(busy=0, tally=Tally(), take=lambda pin: None)
        form = SimpleNamespace(
            key=lambda chunk_hash: chunk_hash,
            stripe_count=STRIPES_A_CHUNK,
            stripe_payload_bytes=CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            blocks_per_chunk=BLOCKS_A_CHUNK,
            block_size_tokens=16,
        )
        self.registration: Any = Registration("engine", 0, 1, form, device, (SimpleNamespace(),))  # type: ignore[arg-type]
        # Without a plane: what moves blocks never waits for Redis.
        self.core: Any = SimpleNamespace(
            pool=self.pool,
            fills=Fills(self.pool),
            metrics=self.metrics,
            copies=self.copies,
            timers=self.timers,
            disk=None,
            post=self.posted.append,
            slots_of=lambda form, entry: [f"slot of {entry.key.decode()}"],
            finish_part=self._finish_part,
        )

    def _finish_part(self, session: Any) -> None:
        session.busy -= 1

    def store(self, hashes: Sequence[bytes] = HASHES, lease_s: float = 30.0) -> StoreJob:
        writes = SimpleNamespace(
            offer=lambda registration, name, entry: self.offered.append(name),
            abandon=lambda entry: None,
        )
        return StoreJob(
            self.core,
            writes,  # type: ignore[arg-type]
            self.session,  # type: ignore[arg-type]
            self.registration,
            hashes,
            self._question(len(hashes), lease_s),
            self.answers.append,
        )

    def retrieve(
        self, hashes: Sequence[bytes] = HASHES, skip_tokens: int = 0, lease_s: float = 30.0
    ) -> RetrieveJob:
        question = self._question(len(hashes), lease_s)
        question.skip_first_n_tokens = skip_tokens
        return RetrieveJob(
            self.core,
            self.session,  # type: ignore[arg-type]
            self.registration,
            hashes,
            question,
            self.answers.append,
        )

    def _question(self, chunks: int, lease_s: float) -> Any:
        return SimpleNamespace(
            request_id="r",
            lease_ns=time.monotonic_ns() + int(lease_s * 1e9),
            block_ids=tuple(range(chunks * BLOCKS_A_CHUNK)),
            event=None,
        )

    def hold(self, *names: bytes) -> list[Entry]:
        """Chunks that are READY in the host pool."""
        entries = []
        for name in names:
            entry = self.pool.reserve(name, 1)
            assert entry is not None
            self.pool.publish(entry)
            self.pool.unpin(entry)
            entries.append(entry)
        return entries

    def run(self, until: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 10
        while not until():
            assert time.monotonic() < deadline_s
            while self.posted:
                self.posted.pop(0)()
            self.timers.run_due()
            time.sleep(0.001)

    def close(self) -> None:
        """Nothing is left behind."""
        assert self.copies.close(10)
        assert self.session.busy == 0
        assert self.pool.pinned_slots == 0
        self.pool.audit()
