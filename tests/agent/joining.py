# SPDX-License-Identifier: Apache-2.0
"""An agent's handlers, and an engine whose workers join when a test says so."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registering import form_of
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.pool import Entry
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import process_start_time
from lmcache_redis.tiers import ChunkIO, WriteOutcome
from tests.cache.played import PlayedTier, run_until
from tests.harness import block_hashes

HASHES = block_hashes("prompt", 8)
LAYOUT = KVLayout((), "uint8", "cpu", 16, 64, (Segment(0, 0, 1000, 1000),))
CHUNK_SIZE_TOKENS = 64
LONG_AGO_S = 60.0


def kv_rank_of(worker_id: int) -> int:
    return ObjectKey.ComputeKVRank(2, worker_id, 2, worker_id)


def group_of(kv_rank: int, layout: KVLayout = LAYOUT) -> m.KVGroup:
    return m.KVGroup(kv_rank, layout, layout.fingerprint(CHUNK_SIZE_TOKENS))


class Joining:
    """An agent's handlers and an engine of two workers, whose memory the test maps."""

    def __init__(self, lookup_deadline_s: float = 30.0, disk_path: Path | None = None) -> None:
        config = AgentConfig(
            redis_url="redis://nowhere:1",
            chunk_size_tokens=CHUNK_SIZE_TOKENS,
            slot_bytes=4096,
            lookup_deadline_s=lookup_deadline_s,
            disk_path=None if disk_path is None else str(disk_path),
        )
        self.arena = Arena(16 * 4096, 4096)
        self.index: set[bytes] = set()  # the chunk keys that Redis has
        self.redis = PlayedTier("Redis", self.index)
        plane: Any = self.redis
        plane.removals = None
        self.agent = Agent.of(config, self.arena, plane)
        self.loop, self.peers = self.agent.loop, self.agent.peers
        self.handlers = Handlers(self.agent)
        self.answers: list[m.Answer] = []
        self.map_memory = threading.Event()
        self.unmap_memory = threading.Event()
        self.unmap_memory.set()
        self.broken = False
        self.opened: list[str] = []  # and closed, in order

    def open_device(self, layouts: Sequence[KVLayout], *_: object) -> Any:
        assert self.map_memory.wait(30)
        if self.broken:
            raise DeviceError("this memory cannot be mapped")
        number = sum(each.startswith("opened") for each in self.opened) + 1
        self.opened.append(f"opened {number}")

        def close() -> None:
            assert self.unmap_memory.wait(30)
            if self.broken:
                raise DeviceError("this memory cannot be unmapped")
            self.opened.append(f"closed {number}")

        return SimpleNamespace(layouts=layouts, end_calls=lambda: None, close=close)

    def join(self, worker_id: int | None, ago_s: float = LONG_AGO_S, unnamed: bool = False) -> Peer:
        """A peer whose HELLO came that many seconds ago."""
        now_s = time.monotonic()
        engine_id = f"process of {worker_id}" if unnamed else "engine"
        hello = m.Hello(1, engine_id, "model", 2, worker_id, "0", unnamed)
        peer = Peer(f"peer {worker_id}".encode(), hello, now_s - ago_s)
        self.peers.add(peer)
        return peer

    def register(
        self,
        peer: Peer,
        told: Callable[[m.Answer], None] = lambda answer: None,
        kv_rank: int | None = None,
    ) -> None:
        if kv_rank is None:
            kv_rank = kv_rank_of(peer.hello.worker_id or 0)
        self.register_groups(peer, [group_of(kv_rank)], told)

    def register_groups(
        self, peer: Peer, groups: Sequence[m.KVGroup], told: Callable[[m.Answer], None]
    ) -> None:
        started = process_start_time(os.getpid())
        storages = (SharedMemoryHandle(os.getpid(), started, 0, 0, 0, 64000),)
        self.handlers.answer(peer, m.RegisterKVCache(1, tuple(groups), storages), told)

    def engine(self, kv_ranks: Sequence[int | None] = (None, None)) -> Peer:
        """The scheduler of an engine whose workers have joined."""
        self.map_memory.set()
        scheduler, *workers = (self.join(each) for each in (None, *range(len(kv_ranks))))
        for worker, kv_rank in zip(workers, kv_ranks, strict=True):
            self.register(worker, kv_rank=kv_rank)
        self.run(lambda: all(each.registration for each in workers))
        return scheduler

    def key(self, chunk_hash: bytes, worker_id: int) -> bytes:
        return self._form(worker_id).key(chunk_hash)

    def _form(self, worker_id: int) -> ChunkForm:
        kv_rank = kv_rank_of(worker_id)
        return form_of(LAYOUT, "model", kv_rank, CHUNK_SIZE_TOKENS, self.agent.config)

    def hold_a_chunk(self, chunk_hash: bytes = HASHES[3]) -> list[Entry]:
        """Puts each rank's part of a chunk into the host pool."""
        entries = []
        for worker_id in range(2):
            entry = self.agent.cache.reserve(self._form(worker_id), chunk_hash)
            assert entry is not None
            assert self.agent.cache.publish(entry)
            entries.append(entry)
        return entries

    def store_on_disk(self, chunk_hash: bytes) -> None:
        """Each rank's part of a chunk."""
        disk, stored = self.agent.disk, []
        assert disk is not None
        self.run(lambda: disk.state.up)
        for worker_id in range(2):
            form = self._form(worker_id)
            views = [memoryview(bytearray(form.chunk_bytes))]
            io = ChunkIO(form.key(chunk_hash), form.frame(chunk_hash), views, math.inf)
            disk.store_all([io], lambda _, outcome: stored.append(outcome))
        self.run(lambda: len(stored) == 2)
        assert stored == [WriteOutcome.STORED] * 2

    def look_up(self, scheduler: Peer, hashes: Sequence[bytes] = HASHES[3:4], **more: Any) -> None:
        question = m.Lookup(2, "r", tuple(hashes), **more)
        self.handlers.answer(scheduler, question, self.answers.append)

    def end_session(self, scheduler: Peer) -> None:
        self.handlers.answer(scheduler, m.EndSession(3, "r"), lambda answer: None)

    def run(self, until: Callable[[], object]) -> None:
        run_until(self.loop, until)

    def close(self) -> None:
        self.map_memory.set()
        self.unmap_memory.set()
        assert self.agent.copies.close(10)
        self.loop.run_posted()
        for peer in self.peers:
            self.handlers.forget(peer, "the test ends")
        assert self.agent.cache.pool.pinned == 0
        if self.agent.disk is not None:
            assert self.agent.disk.close(10)
        self.agent.wakeup.close()
        self.arena.close()
