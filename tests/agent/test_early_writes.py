"""Chunks of a GPU that are on their way to a real Redis while it still copies them to the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.core import Core
from lmcache_redis.agent.registration import ChunkForm, Registration
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.agent.writes import Writes
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from lmcache_redis.hostpool import Arena
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import ReadOutcome
from lmcache_redis.resp.plane import RedisPlane
from tests.harness import block_hashes
from tests.servers import RedisServer

BLOCK_BYTES = 1000
BLOCKS_A_CHUNK = 4
SLOT_BYTES = 1024
STRIPES = 4
CHUNKS = 2
HASHES = block_hashes("prompt", CHUNKS)


class SteppedGpu:
    """Plays a GPU whose copies to the host the test lets go on, a slot at a time.

    The bytes of a block are its id.
    """

    call_bytes = CHUNKS * BLOCKS_A_CHUNK * BLOCK_BYTES
    on_host_cores = False

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.late = False
        self._broken = False

    def step(self, slots: int = 1) -> None:
        for _ in range(slots):
            self._steps.release()

    def fail(self) -> None:
        self._broken = True
        self.step()

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_bytes: int,
        event: bytes | None,
        read: Callable[[], None],
        until_ns: int,
        chunks: int,
        filled: Callable[[int], None],
    ) -> None:
        if self.late:
            time.sleep(max(0, until_ns - time.monotonic_ns()) / 1e9 + 0.01)
        read()
        for number, slot in enumerate(slots):
            if number:
                filled(number)
            assert self._steps.acquire(timeout=30)
            if self._broken:
                raise DeviceError("a copy on cuda:0 failed")
            chunk, stripe = divmod(number, STRIPES)
            ids = block_ids[chunk * BLOCKS_A_CHUNK : (chunk + 1) * BLOCKS_A_CHUNK]
            begin = stripe * stripe_bytes
            slot[:] = content(ids)[begin : begin + len(slot)]


def content(block_ids: Sequence[int]) -> bytes:
    return b"".join(bytes([block]) * BLOCK_BYTES for block in block_ids)


class Store:
    """A store of two chunks, its agent's core and everything behind that, but for the GPU."""

    def __init__(self, redis: RedisServer) -> None:
        layout = KVLayout((), "uint8", "cuda", 16, 64, (Segment(0, 0, BLOCK_BYTES, BLOCK_BYTES),))
        self.form = ChunkForm.of(
            layout,
            model_name="test/model",
            kv_rank=0,
            chunk_size_tokens=16 * BLOCKS_A_CHUNK,
            slot_bytes=SLOT_BYTES,
            key_prefix=b"",
        )
        assert self.form.stripe_count == STRIPES
        self.gpu = SteppedGpu()
        self.registration = Registration(
            "engine",
            0,
            1,
            self.form,
            self.gpu,
            (SimpleNamespace(),),  # type: ignore[arg-type]
        )
        self.arena = Arena(64 * 4096, SLOT_BYTES)
        self.plane = RedisPlane(RedisOptions(redis.url))
        self.plane.start()
        self.plane.wait_probed(10)
        self.core = Core(AgentConfig(redis_url=redis.url), self.arena, self.plane)
        self.writes = Writes(self.core)
        self.session = self.core.sessions.open(("engine", "r"), time.monotonic())
        self.answers: list[m.Answer] = []
        self.redis = redis

    def start(self, lease_s: float = 30.0) -> None:
        question: Any = SimpleNamespace(
            request_id="r",
            lease_ns=time.monotonic_ns() + int(lease_s * 1e9),
            block_ids=tuple(range(CHUNKS * BLOCKS_A_CHUNK)),
            event=None,
        )
        StoreJob(
            self.core,
            self.writes,
            self.session,
            self.registration,
            HASHES,
            question,
            self.answers.append,
        ).start()

    def run(self, until: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 15
        while not until():
            assert time.monotonic() < deadline_s
            self.core.run_posted()
            self.core.timers.run_due()
            time.sleep(0.001)

    def finish(self) -> None:
        self.run(lambda: self.session.busy == 0 and not len(self.writes))

    def in_redis(self) -> list[list[int]]:
        """Which stripes of each chunk are there."""
        with self.redis.client() as client:
            return [
                [n for n in range(STRIPES) if client.exists(stripe_key(self.form.key(each), n))]
                for each in HASHES
            ]

    def load(self, chunk: int) -> tuple[ReadOutcome, bytes]:
        """A chunk as another agent would find it."""
        entry = self.core.pool.reserve(b"elsewhere", STRIPES)
        assert entry is not None
        io = self.core.chunk_io(self.form, HASHES[chunk], entry, time.monotonic() + 10)
        io.key = self.form.key(HASHES[chunk])
        outcomes: list[ReadOutcome] = []
        self.plane.read(io, lambda _, outcome: outcomes.append(outcome))
        self.run(lambda: outcomes)
        loaded = b"".join(io.slots)
        self.core.pool.discard(entry)
        self.core.pool.unpin(entry)
        return outcomes[0], loaded

    def counters(self) -> dict[str, int]:
        found = self.core.metrics.snapshot()
        return {
            name: int(value)
            for name, value in found.items()
            if value and name.startswith(("drop_", "stored_chunks"))
        }

    def close(self) -> None:
        assert self.core.copies.close(10)
        assert self.plane.close(5)
        self.core.run_posted()
        assert self.core.pool.pinned_slots == 0
        assert self.writes.queued_bytes == 0
        self.core.pool.audit()
        self.core.wakeup.close()
        self.arena.close()


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[Store]:
    store = Store(redis_server)
    yield store
    store.close()


def test_stripes_are_in_redis_before_the_chunk_is_in_the_host_pool(store: Store) -> None:
    store.start()
    store.run(lambda: store.answers)
    assert store.answers == [m.StoreResult(0, CHUNKS, 0, 0)]
    assert store.in_redis() == [[], []]
    store.gpu.step(2)
    store.run(lambda: store.in_redis() == [[1], []])
    assert store.core.fills.filling(store.core.pool.get(store.form.key(HASHES[0])))  # type: ignore[arg-type]
    # A whole chunk in the middle of a call waits for its last stripe and stripe 0 all the same.
    store.gpu.step(4)
    store.run(lambda: store.in_redis() == [[1, 2], [1]])
    assert store.load(0)[0] is ReadOutcome.MISSING
    assert store.counters() == {}
    store.gpu.step(2)
    store.finish()
    everything = list(range(STRIPES))
    assert store.in_redis() == [everything, everything]
    for chunk in range(CHUNKS):
        first = chunk * BLOCKS_A_CHUNK
        expected = content(range(first, first + BLOCKS_A_CHUNK))
        assert store.load(chunk) == (ReadOutcome.LOADED, expected)
        entry = store.core.pool.get(store.form.key(HASHES[chunk]))
        assert entry is not None
        assert entry.persisted
    assert store.counters() == {"stored_chunks": CHUNKS}


def test_a_copy_that_fails_takes_back_what_was_sent(store: Store) -> None:
    store.start()
    store.gpu.step(6)
    store.run(lambda: store.in_redis() == [[1, 2], [1]])
    store.gpu.fail()
    store.finish()
    store.run(lambda: store.in_redis() == [[], []])
    assert store.counters() == {"drop_device_error": CHUNKS}
    assert not len(store.core.pool)
    # The next store of the same chunks is one like any other.
    store.gpu._broken = False
    store.start()
    store.gpu.step(8)
    store.finish()
    assert store.load(1)[0] is ReadOutcome.LOADED


def test_what_was_read_past_the_lease_is_never_sent(store: Store) -> None:
    store.gpu.late = True
    store.start(lease_s=0.05)
    store.gpu.step(7)
    for _ in range(100):
        store.core.run_posted()
        time.sleep(0.002)
    store.gpu.step(1)
    store.finish()
    with store.redis.client() as client:
        assert "cmdstat_set" not in client.info("commandstats")
    assert store.counters() == {"drop_lease": CHUNKS}


def test_a_chunk_that_is_cleared_meanwhile_is_taken_back(store: Store) -> None:
    store.start()
    store.gpu.step(6)
    store.run(lambda: store.in_redis() == [[1, 2], [1]])
    store.core.pool.clear()
    store.gpu.step(2)
    store.finish()
    store.run(lambda: store.in_redis() == [[], []])
    assert store.counters() == {}


def test_redis_that_dies_meanwhile_costs_one_attempt(
    store: Store, redis_server: RedisServer
) -> None:
    """Early writes that fail are no drops: the chunk is offered when it is complete."""
    store.start()
    store.gpu.step(3)
    store.run(lambda: store.in_redis() == [[1, 2], []])
    redis_server.kill()
    store.run(lambda: not store.plane.state.up)
    store.run(lambda: not len(store.writes))
    assert store.counters() == {}
    redis_server.start()
    store.run(lambda: store.plane.state.up)
    store.gpu.step(5)
    store.finish()
    assert store.counters() == {"stored_chunks": CHUNKS}
    assert store.load(0) == (ReadOutcome.LOADED, content(range(BLOCKS_A_CHUNK)))


def test_a_full_server_is_asked_once_early_and_once_more(
    store: Store, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
    store.start()
    store.gpu.step(3)
    store.run(lambda: store.writes._filling and not len(store.writes))
    with redis_server.client() as client:
        asked = client.info("commandstats").get("cmdstat_set", {}).get("rejected_calls", 0)
    store.gpu.step(4)
    store.run(lambda: list(store.writes._filling.values()) == [None, None])
    with redis_server.client() as client:
        again = client.info("commandstats")["cmdstat_set"]["rejected_calls"]
    # One attempt each, of which a second stripe may have been on its way: no more before the end.
    assert 1 <= asked <= 2
    assert 1 <= again - asked <= 2
    store.gpu.step(1)
    store.finish()
    assert store.counters() == {"drop_redis_full": CHUNKS}


def test_what_redis_has_is_not_sent_again(store: Store) -> None:
    def sets() -> int:
        with store.redis.client() as client:
            return int(client.info("commandstats")["cmdstat_set"]["calls"])

    store.start()
    store.gpu.step(CHUNKS * STRIPES)
    store.finish()
    sent = sets()
    store.core.pool.clear()
    store.start()
    store.gpu.step(3)
    store.run(lambda: store.writes._filling and not len(store.writes))
    store.gpu.step(CHUNKS * STRIPES - 3)
    store.finish()
    assert sets() == sent
    assert store.answers[-1] == m.StoreResult(0, CHUNKS, 0, 0)
    assert store.counters() == {"stored_chunks": CHUNKS}
    assert store.core.metrics.snapshot()["skipped_chunks"] == CHUNKS
    entries = [store.core.pool.get(store.form.key(each)) for each in HASHES]
    assert all(entry is not None and entry.persisted for entry in entries)


def test_a_full_queue_takes_nothing_early(store: Store) -> None:
    others = store.core.config.write_queue_limit_bytes - store.form.chunk_bytes
    store.writes.queued_bytes += others
    store.start()
    store.gpu.step(7)
    store.run(lambda: store.in_redis() == [[1, 2], []])
    store.gpu.step(1)
    store.finish()
    assert store.counters() == {"drop_queue_full": 1, "stored_chunks": 1}
    store.writes.queued_bytes -= others
