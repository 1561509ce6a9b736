# SPDX-License-Identifier: Apache-2.0
"""Doubles for what a job uses: a device and the parts of the agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.jobs import RetrieveJob, StoreJob
from lmcache_redis.agent.peers import Peers, Registration
from lmcache_redis.agent.sessions import Session, Sessions
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.calls import CopyCall
from lmcache_redis.metrics import Metrics
from tests.cache.auditing import audit
from tests.cache.played import FORM, run_until

BLOCKS_A_CHUNK = 2
STRIPES_A_CHUNK = 1
CHUNK_BYTES = 64
HASHES = [b"a", b"b", b"c", b"d", b"e"]


class Device:
    """A double of a GPU. ``during`` runs inside each call, after ``on_blocks_read``."""

    def __init__(
        self, *, chunks_a_call: int = 1, during: Callable[[], None] = lambda: None
    ) -> None:
        self.call_bytes = chunks_a_call * CHUNK_BYTES - 1  # the last chunk fills it up
        self.layouts = [SimpleNamespace(block_size_tokens=16)]
        self.on_host_cores = False
        self.during = during
        self.calls: list[tuple[int, list[int], list[str], int]] = []

    def gather(self, call: CopyCall, on_blocks_read: Callable[[], None]) -> None:
        self._record(call)
        on_blocks_read()
        self.during()

    def scatter(self, call: CopyCall) -> None:
        self._record(call)
        self.during()

    def _record(self, call: CopyCall) -> None:
        block_ids = [block for each in call.chunks for block in each.block_ids]
        slots: list[Any] = [slot for each in call.chunks for slot in each.slots]
        skipped = sum(each.skip_blocks for each in call.chunks)
        self.calls.append((len(call.chunks), block_ids, slots, skipped))


@dataclass(frozen=True)
class Form:
    """A double of a ChunkForm whose chunks have their hashes as keys."""

    model_name: str = "org/model"
    stripe_count: int = STRIPES_A_CHUNK
    stripe_sizes: tuple[int, ...] = (CHUNK_BYTES,)
    chunk_bytes: int = CHUNK_BYTES
    reach: Reach = FULL_REACH

    def key(self, chunk_hash: bytes) -> bytes:
        return chunk_hash

    def stem(self, hash_bytes: int) -> bytes:
        return b""


class PlayedCache(Cache):
    """A cache without tiers that records what is written behind. Its slots are names."""

    def __init__(self, loop: OwnerLoop, slots: int) -> None:
        super().__init__(loop, Arena(slots * 4096, CHUNK_BYTES), [], Metrics())
        self.written_behind: list[bytes] = []

    def views(self, entry: Entry) -> Any:
        return [f"slot of {entry.key.decode()}"]

    def write_behind(self, entry: Entry, *_: Any, **__: Any) -> None:
        self.written_behind.append(entry.key)


class Played:
    """The parts of the agent that a job uses (cache, copy threads, session), and its answers."""

    def __init__(
        self, device: Any, *, slots: int = 8, cache: Callable[[OwnerLoop], Any] | None = None
    ) -> None:
        self.loop = OwnerLoop(lambda: None)
        self.cache = PlayedCache(self.loop, slots) if cache is None else cache(self.loop)
        self.pool, self.metrics = self.cache.pool, self.cache.metrics
        self.copies = CopyThreads(1)
        self.sessions = Sessions(self.pool, self.metrics)
        self.session = self.sessions.open(("engine", "r"), time.monotonic())
        self.agent: Any = SimpleNamespace(
            config=AgentConfig(),
            cache=self.cache,
            copies=self.copies,
            sessions=self.sessions,
            peers=Peers(),
        )
        self.answers: list[Any] = []
        form: Any = Form() if cache is None else FORM
        self.registration = Registration(
            "engine",
            0,
            CHUNK_BYTES,
            (form,),
            device,
            (SimpleNamespace(),),  # type: ignore[arg-type]
        )

    def store(self, hashes: Sequence[bytes] = HASHES, lease_s: float = 30.0) -> StoreJob:
        question = m.Store(0, "r", tuple(hashes), *_blocks_and_lease(hashes, lease_s))
        return StoreJob(*self._parts, question, self.answers.append)

    def retrieve(
        self, hashes: Sequence[bytes] = HASHES, lease_s: float = 30.0, skip_tokens: int = 0
    ) -> RetrieveJob:
        blocks, lease_ns = _blocks_and_lease(hashes, lease_s)
        question = m.Retrieve(0, "r", tuple(hashes), blocks, skip_tokens, lease_ns)
        return RetrieveJob(*self._parts, question, self.answers.append)

    @property
    def _parts(self) -> tuple[Any, Session, Registration]:
        return self.agent, self.session, self.registration

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
        run_until(self.loop, until)

    def close(self) -> None:
        """Check that no thread, job or pin is left."""
        assert self.copies.close(10)
        assert self.session.busy == 0
        assert self.pool.pinned == 0
        audit(self.pool)


def _blocks_and_lease(hashes: Sequence[bytes], lease_s: float) -> tuple[tuple[int, ...], int]:
    blocks = tuple(range(len(hashes) * BLOCKS_A_CHUNK))
    return blocks, time.monotonic_ns() + int(lease_s * 1e9)
