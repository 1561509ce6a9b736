"""A disk that does not answer: Redis is asked instead, until it does.

Files are replaced by FIFOs: to open one for reading blocks until somebody writes, as an NFS
server that is gone does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.agent import disk as disk_module
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.disk import Disk
from lmcache_redis.agent.registration import ChunkForm
from lmcache_redis.agent.timers import Timers
from lmcache_redis.hostpool import Arena, Entry, HostPool
from lmcache_redis.metrics import Metrics
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.storage.disk_files import ChunkFiles
from tests.agent.test_disk import CHUNKS, HASHES, TOKENS, agent_with_disk, check_hit, files
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

OTHERS = block_hashes("another", 32)


class Hang:
    """FIFOs in place of files; whoever opens one hangs until `end`."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        for path in paths:
            path.unlink()
            os.mkfifo(path)

    def end(self) -> None:
        """Everyone who hangs goes on, and finds nothing; nobody can hang any more."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # where nobody hangs
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            path.unlink(missing_ok=True)
        self._paths = []


def stored(tmp_path: Path, redis: RedisServer, **options: object) -> AgentServer:
    """An agent whose 16 chunks of two prompts are on disk and in Redis, and not in its pool."""
    agent = agent_with_disk(tmp_path, redis, **options)
    with agent, Engine(agent.endpoint) as engine:
        engine.randomize(range(32))
        engine.store("r1", HASHES, range(32))
        engine.store("r2", OTHERS, range(32))
        agent.wait_idle()
        assert agent.terminate() == 0
    assert len(files(tmp_path / "disk")) == 2 * CHUNKS
    return agent


def test_a_hung_read_is_asked_of_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    """Two reads hang and fourteen wait: the lookup has everything before its deadline."""
    options = {"lookup_deadline_s": 4, "log_level": "info"}
    with stored(tmp_path, redis_server, **options) as agent, Engine(agent.endpoint) as engine:
        hang = Hang(files(tmp_path / "disk"))
        engine.randomize(range(48))
        assert engine.lookup("r3", HASHES) == TOKENS
        assert agent.counter("lookups_timed_out") == 0
        assert agent.counter("hit_chunks_redis") == agent.counter("miss_disk") == CHUNKS
        status = agent.status()["disk"]
        assert not status["up"]
        assert "a read has not returned" in status["reason"]

        # While it is down: nothing is on disk, nothing is written, and each is counted.
        assert agent.counter("drop_disk") == CHUNKS
        assert engine.lookup("r4", OTHERS) == TOKENS
        assert agent.counter("hit_chunks_redis") == 2 * CHUNKS
        assert agent.counter("miss_disk") == CHUNKS, "nobody waited for the disk again"
        engine.store("r5", block_hashes("third", 32), range(32))
        agent.wait_idle()
        assert agent.counter("drop_disk") == 3 * CHUNKS
        assert agent.counter("disk_stored_chunks") == 0

        hang.end()
        wait_until(lambda: agent.status()["disk"]["up"])
        assert agent.status()["disk"]["reason"] == ""
        engine.store("r6", block_hashes("fourth", 32), range(32))
        wait_until(lambda: agent.counter("disk_stored_chunks") == CHUNKS)
        assert agent.log.count("the disk tier is down") == 1
        assert agent.log.count("the disk tier is back") == 1
        for request_id in ("r3", "r4"):
            engine.scheduler.end_session(request_id)
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0)
        assert "Traceback" not in agent.log


def test_what_comes_from_redis_goes_into_slots_of_its_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The hung read may write into its slots at any time: they are not used until it returns."""
    with stored(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        hang = Hang(files(tmp_path / "disk"))
        assert engine.lookup("r3", HASHES) == TOKENS
        pinned = agent.status()["pool"]["pinned_slots"]
        hang.end()
        wait_until(lambda: agent.status()["disk"]["up"])
        # Two more chunks before, one for each thread that hung.
        assert pinned * CHUNKS == agent.status()["pool"]["pinned_slots"] * (CHUNKS + 2)
        engine.scheduler.end_session("r3")
        wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0)


def test_bytes_after_a_hang_are_those_that_were_stored(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with agent_with_disk(tmp_path, redis_server) as agent, Engine(agent.endpoint) as engine:
        engine.randomize(range(32))
        engine.store("r1", HASHES, range(32))
        agent.wait_idle()
        agent.restart()
        engine.wait_ready()
        hang = Hang(files(tmp_path / "disk")[:3])
        check_hit(engine)
        assert agent.counter("hit_chunks_redis") + agent.counter("hit_chunks_disk") == CHUNKS
        hang.end()


def test_a_second_lookup_joins_and_falls_over_as_well(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Two lookups of one prompt wait for the same read; Redis is read once for both."""
    with (
        stored(tmp_path, redis_server, lookup_deadline_s=4) as agent,
        Engine(agent.endpoint) as engine,
    ):
        hang = Hang(files(tmp_path / "disk"))
        for request_id in ("r3", "r4"):
            engine.scheduler.maybe_submit_lookup_request(request_id, block_hashes=HASHES)
        for request_id in ("r3", "r4"):
            assert engine.lookup(request_id, HASHES) == TOKENS
        assert agent.counter("loaded_chunks") == CHUNKS
        assert agent.counter("lookups_timed_out") == 0
        hang.end()


@pytest.mark.parametrize("lookup_deadline_s", [0.5, 600])
def test_the_agent_stops_though_the_disk_hangs(
    tmp_path: Path, redis_server: RedisServer, lookup_deadline_s: float
) -> None:
    """Whether it is known to be down or not. `terminate` waits for seconds, not for ever."""
    with (
        stored(tmp_path, redis_server, lookup_deadline_s=lookup_deadline_s) as agent,
        Engine(agent.endpoint) as engine,
    ):
        hang = Hang(files(tmp_path / "disk"))
        engine.scheduler.maybe_submit_lookup_request("r3", block_hashes=HASHES)
        if lookup_deadline_s < 1:
            wait_until(lambda: not agent.status()["disk"]["up"])
        else:
            wait_until(lambda: agent.status()["sessions"] == 1)
        assert agent.terminate() == 0
        assert "stopped" in agent.log
        assert "Traceback" not in agent.log
        hang.end()


def test_a_clear_while_the_disk_hangs_is_made_up_for(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with (
        stored(tmp_path, redis_server, lookup_deadline_s=1) as agent,
        Engine(agent.endpoint) as engine,
    ):
        hang = Hang(files(tmp_path / "disk")[:12])
        engine.lookup("r3", HASHES)
        engine.lookup("r4", OTHERS)
        assert not agent.status()["disk"]["up"]
        engine.scheduler.clear()
        wait_until(lambda: redis_server.command("DBSIZE") == 0, what="a cleared Redis")
        assert files(tmp_path / "disk"), "nobody waits for the disk"
        hang.end()
        wait_until(lambda: agent.status()["disk"]["up"])
        assert not files(tmp_path / "disk")
        assert engine.lookup("r5", HASHES) == engine.lookup("r6", OTHERS) == 0


# ------------------------------------------------------------------ in this process

FORM = ChunkForm(
    model_name="m",
    kv_rank=0,
    fingerprint=bytes(32),
    blocks_per_chunk=1,
    block_size_tokens=16,
    chunk_bytes=4096,
    stripe_payload_bytes=4096,
    metadata=RemoteMetadata(4096, [(4096,)], ["uint8"], MemoryFormat.PAGES).serialize(),
    key_prefix=b"",
)


class Loop:
    """What a disk needs of an agent's core, and a loop that runs until something holds."""

    def __init__(self, directory: Path) -> None:
        self._arena = Arena(1 << 20, 4096)
        self._posted: deque[Callable[[], None]] = deque()
        self.config = SimpleNamespace(lookup_deadline_s=0.4, write_queue_limit_bytes=1 << 20)
        self.metrics = Metrics()
        self.timers = Timers()
        self.pool = HostPool(self._arena.slot_count)
        self.disk = Disk(self, str(directory), 1 << 20)  # type: ignore[arg-type]

    def post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)

    def slots_of(self, form: ChunkForm, entry: Entry) -> list[memoryview]:
        return [self._arena.slot_view(slot, form.chunk_bytes) for slot in entry.slots]

    def ready(self, chunk_hash: bytes) -> Entry:
        entry = self.pool.reserve(FORM.key(chunk_hash), 1)
        assert entry is not None
        self.slots_of(FORM, entry)[0][:] = chunk_hash * 4096
        assert self.pool.publish(entry)
        return entry

    def until(self, condition: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s
            self.timers.run_due()
            while self._posted:
                self._posted.popleft()()
            time.sleep(0.001)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "disk")
    yield loop
    loop.disk.close()
    loop.until(lambda: not loop.disk.backlog)
    loop.pool.audit()


@pytest.fixture
def hung_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Writes of files hang until what is given is called."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setattr(disk_module, "_STORE_PATIENCE_S", 0.3)
    write, hangs = ChunkFiles.write, threading.Event()
    hangs.set()

    def hang_and_write(*args: Any) -> None:
        if hangs.is_set():
            os.close(os.open(fifo, os.O_RDONLY))
        write(*args)

    def go_on() -> None:
        hangs.clear()
        writer = os.open(fifo, os.O_RDWR)
        os.close(writer)

    monkeypatch.setattr(ChunkFiles, "write", hang_and_write)
    yield go_on
    go_on()


def test_a_hung_write_drops_what_waits_and_is_stored_after_all(
    loop: Loop, hung_writes: Callable[[], None]
) -> None:
    entries = [loop.ready(bytes([number])) for number in range(3)]
    for number, entry in enumerate(entries):
        loop.disk.offer(FORM, bytes([number]), entry)
    assert loop.disk.backlog == 3
    loop.until(lambda: not loop.disk.is_up)
    assert "a write has not returned" in loop.disk.reason
    assert loop.disk.backlog == 0
    assert loop.metrics["drop_disk"] == 2
    assert loop.disk.queued_bytes == FORM.chunk_bytes, "of the one that hangs"
    # Those that waited are as they were; the one that is being read from keeps its slots.
    assert [entry.pins for entry in entries] == [2, 1, 1]
    loop.disk.offer(FORM, bytes([1]), entries[1])
    assert loop.metrics["drop_disk"] == 3
    hung_writes()
    loop.until(lambda: loop.disk.is_up)
    assert loop.metrics["disk_stored_chunks"] == 1
    assert [entry.pins for entry in entries] == [1, 1, 1]
    assert loop.disk.queued_bytes == 0
    assert loop.disk.has(FORM, bytes([0]))
    loop.disk.offer(FORM, bytes([1]), entries[1])
    loop.until(lambda: loop.disk.has(FORM, bytes([1])) and not loop.disk.backlog)


def test_nobody_who_stops_waits_for_a_hung_write(
    loop: Loop, hung_writes: Callable[[], None]
) -> None:
    """An agent that stops runs no timers any more, so nobody finds out."""
    loop.disk.offer(FORM, bytes([0]), loop.ready(bytes([0])))
    wait_until(lambda: loop.disk.backlog == 0)
    assert loop.disk.is_up
    assert loop.disk.queued_bytes
    loop.disk.close()
    loop.disk.close()
    hung_writes()
    loop.until(lambda: not loop.disk.queued_bytes)
    assert loop.metrics["disk_stored_chunks"] == 1


def test_slots_of_a_hung_read_are_not_given_to_anybody(loop: Loop, tmp_path: Path) -> None:
    first = loop.ready(b"\0")
    loop.disk.offer(FORM, b"\0", first)
    loop.until(lambda: not loop.disk.backlog)
    loop.pool.discard(first)
    loop.pool.unpin(first)
    hang = Hang(files(tmp_path / "disk"))
    entry = loop.pool.reserve(FORM.key(b"\0"), 1)
    assert entry is not None
    outcomes: list[CopyOutcome] = []
    loop.disk.load(FORM, b"\0", entry, outcomes.append)
    loop.until(lambda: outcomes)
    assert outcomes == [CopyOutcome.CANCELLED]
    assert not loop.disk.has(FORM, b"\0")
    assert loop.disk.keeps(entry)
    # What the loop does with it then.
    loop.pool.discard(entry)
    loop.pool.unpin(entry)
    assert loop.pool.used_slots == 1
    hang.end()
    loop.until(lambda: loop.disk.is_up)
    assert outcomes == [CopyOutcome.CANCELLED], "told once"
    assert not loop.disk.keeps(entry)
    assert loop.pool.used_slots == 0
