"""Everything at once: each call is answered once, in time, and never with wrong bytes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ChunkIO, ReadOutcome, WriteOutcome
from tests.resp.helpers import PATIENCE_S, Chunk, chunk_key, read, running, wait_until, write
from tests.resp.proxy import Action, Cut, Forge, Proxy, Stall
from tests.servers import RedisServer

pytestmark = pytest.mark.usefixtures("both_ways")

CHUNKS = 20
SIZE = 30_000
SLOT = 4096
SECONDS = 3.0
# Generous for a machine that does other things; without deadlines it would be for ever.
LATE_S = 5.0


class Traffic:
    """Submits reads, writes, scans and cancels, and keeps the books."""

    def __init__(self, plane: RedisPlane, seed: int) -> None:
        self._plane = plane
        self._random = random.Random(seed)
        self._contents = [Chunk(n, SIZE, SLOT, seed=n).content for n in range(CHUNKS)]
        self._lock = threading.Lock()
        self._pending: dict[object, float] = {}
        self.outcomes: set[object] = set()
        self.problems: list[str] = []

    def some(self) -> None:
        for _ in range(self._random.randrange(1, 10)):
            number = self._random.randrange(CHUNKS)
            stores = self._random.random() < 0.5
            chunk = Chunk(number, SIZE, SLOT, seed=number if stores else None)
            io = chunk.io(self._random.choice([0.05, 0.2, 1.0, 3.0]))
            self._expect(io, io.deadline)
            if stores:
                self._plane.store_all((io,), self._written)
            else:
                self._plane.load_all((io,), self._read)
            if self._random.random() < 0.1:
                self._plane.cancel(io)
        token = object()
        deadline = time.monotonic() + 0.5
        self._expect(token, deadline)
        keys = [chunk_key(number) for number in range(CHUNKS)]
        self._plane.scan(keys, deadline, lambda result: self._answered(token, result.outcome))

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._pending)

    def _expect(self, token: object, deadline: float) -> None:
        with self._lock:
            self._pending[token] = deadline

    def _answered(self, token: object, outcome: object) -> None:
        with self._lock:
            deadline = self._pending.pop(token, None)
        self.outcomes.add(outcome)
        if deadline is None:
            self.problems.append(f"{outcome} came a second time")
        elif time.monotonic() > deadline + LATE_S:
            self.problems.append(f"{outcome} came late")

    def _written(self, io: ChunkIO, outcome: WriteOutcome) -> None:
        self._answered(io, outcome)

    def _read(self, io: ChunkIO, outcome: ReadOutcome) -> None:
        chunk = io.tag
        assert isinstance(chunk, Chunk)
        if outcome is ReadOutcome.LOADED and chunk.content != self._contents[chunk.number]:
            self.problems.append(f"chunk {chunk.number} has wrong bytes")
        self._answered(io, outcome)


def wreak(server: RedisServer, proxy: Proxy, source: random.Random, until: float) -> None:
    """Kill, stop, cut and garble until the time is over; leave everything running."""

    def pause() -> None:
        time.sleep(source.random() * 0.3)

    def stop() -> None:
        server.stop()
        pause()
        server.cont()

    def kill() -> None:
        server.kill()
        pause()
        server.start()

    def garble() -> None:
        choices: list[Action] = [Forge(b"+OK\r\n"), Forge(b"$-1\r\n"), Forge(b"\0" * 99)]
        choices += [Cut(source.randrange(5000)), Stall(source.randrange(5000))]
        proxy.for_gets.append(source.choice(choices))

    deeds: list[Callable[[], None]] = [stop, kill, proxy.cut_all, garble, garble]
    while time.monotonic() < until:
        source.choice(deeds)()
        pause()


@pytest.mark.parametrize("seal_keys", [None, SealKeys([bytes(32)])], ids=["plain", "sealed"])
@pytest.mark.parametrize("seed", [1])
def test_chaos(own_server: RedisServer, seed: int, seal_keys: SealKeys | None) -> None:
    times = {"op_timeout_s": 0.3, "connect_timeout_s": 0.3}
    settings = {**times, "set_connections": 2, "seal_keys": seal_keys}
    with Proxy(own_server.port) as proxy, running(proxy.url, **settings) as plane:
        traffic = Traffic(plane, seed)
        until = time.monotonic() + SECONDS
        arguments = (own_server, proxy, random.Random(seed), until)
        chaos = threading.Thread(target=wreak, args=arguments)
        chaos.start()
        while time.monotonic() < until:
            traffic.some()
            time.sleep(0.005)
        chaos.join()
        wait_until(lambda: not traffic.pending, "calls were not answered")
        assert traffic.problems == []
        assert len(traffic.outcomes) > 1
        proxy.for_gets.clear()
        wait_until(lambda: plane.state.up)
        chunk = Chunk(77, SIZE, SLOT, seed=77)
        wait_until(lambda: write(plane, chunk, within_s=PATIENCE_S) == [WriteOutcome.STORED])
        assert read(plane, Chunk(77, SIZE, SLOT)) == [ReadOutcome.LOADED]
