"""An agent's handlers, and an engine whose workers join when a test says so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.handlers import Handlers
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registering import form_of
from lmcache_redis.cache.pool import Arena
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import process_start_time
from tests.cache.played import run_until
from tests.harness import block_hashes

HASHES = block_hashes("prompt", 8)
LAYOUT = KVLayout((), "uint8", "cpu", 16, 64, (Segment(0, 0, 1000, 1000),))
CHUNK_SIZE_TOKENS = 64
LONG_AGO_S = 60.0


class Joining:
    """An agent's handlers and an engine of two workers, whose memory the test maps."""

    def __init__(self, lookup_deadline_s: float = 30.0) -> None:
        config = AgentConfig(
            redis_url="redis://nowhere:1",
            chunk_size_tokens=CHUNK_SIZE_TOKENS,
            slot_bytes=4096,
            lookup_deadline_s=lookup_deadline_s,
        )
        self.arena = Arena(16 * 4096, 4096)
        never = {"cancel": None, "clear": None, "close": None}
        plane: Any = SimpleNamespace(state=SimpleNamespace(probed=True), **never)
        self.agent = Agent.of(config, self.arena, plane)
        self.loop, self.peers = self.agent.loop, self.agent.peers
        self.handlers = Handlers(self.agent)
        self.answers: list[m.Answer] = []
        self.map_memory = threading.Event()
        self.broken = False
        self.opened: list[str] = []  # and closed, in order

    def open_device(self, layouts: Sequence[KVLayout], *_: object) -> Any:
        assert self.map_memory.wait(30)
        if self.broken:
            raise DeviceError("this memory cannot be mapped")
        number = sum(each.startswith("opened") for each in self.opened) + 1
        self.opened.append(f"opened {number}")
        return SimpleNamespace(
            layouts=layouts, close=lambda: self.opened.append(f"closed {number}")
        )

    def join(self, worker_id: int | None, ago_s: float = LONG_AGO_S, unnamed: bool = False) -> Peer:
        """A peer whose HELLO came that many seconds ago."""
        now_s = time.monotonic()
        engine_id = f"process of {worker_id}" if unnamed else "engine"
        hello = m.Hello(1, engine_id, "model", 2, worker_id, "0", unnamed)
        peer = Peer(f"peer {worker_id}".encode(), hello, now_s, now_s - ago_s)
        self.peers.add(peer)
        return peer

    def register(self, peer: Peer, told: Callable[[m.Answer], None] = lambda answer: None) -> None:
        worker_id = peer.hello.worker_id
        assert worker_id is not None
        question = m.RegisterKVCache(
            1,
            (
                m.KVGroup(
                    ObjectKey.ComputeKVRank(2, worker_id, 2, worker_id),
                    LAYOUT,
                    LAYOUT.fingerprint(CHUNK_SIZE_TOKENS),
                ),
            ),
            (SharedMemoryHandle(os.getpid(), process_start_time(os.getpid()), 0, 0, 0, 64000),),
        )
        self.handlers.answer(peer, question, told)

    def hold_a_chunk(self) -> None:
        """Puts each rank's part of a chunk into the host pool."""
        for worker_id in range(2):
            kv_rank = ObjectKey.ComputeKVRank(2, worker_id, 2, worker_id)
            form = form_of(LAYOUT, "model", kv_rank, CHUNK_SIZE_TOKENS, self.agent.config)
            entry = self.agent.cache.reserve(form, HASHES[3])
            assert entry is not None
            assert self.agent.cache.publish(entry)

    def look_up(self, scheduler: Peer) -> None:
        question = m.Lookup(2, "r", (HASHES[3],))
        self.handlers.answer(scheduler, question, self.answers.append)

    def run(self, until: Callable[[], object]) -> None:
        run_until(self.loop, until)

    def close(self) -> None:
        self.map_memory.set()
        assert self.agent.copies.close(10)
        self.loop.run_posted()
        for peer in self.peers:
            self.handlers.forget(peer, "the test ends")
        assert self.agent.cache.pool.pinned == 0
        self.agent.wakeup.close()
        self.arena.close()
