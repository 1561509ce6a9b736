# SPDX-License-Identifier: Apache-2.0
"""Everything at once: each call is answered once, in time, and never with wrong bytes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import PATIENCE_S, Chunk, read, running, wait_until, write
from tests.resp.proxy import Action, Cut, Forge, Proxy, Stall
from tests.resp.traffic import SIZE, SLOT, Traffic
from tests.servers import RedisServer

pytestmark = pytest.mark.usefixtures("both_ways")

SECONDS = 2.0


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
def test_chaos(own_server: RedisServer, seal_keys: SealKeys | None) -> None:
    seed = 1
    times = {"op_timeout_s": 0.3, "connect_timeout_s": 0.3}
    settings = {**times, "connections": 2, "seal_keys": seal_keys}
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
        wait_until(lambda: read(plane, chunk.empty()) == [ReadOutcome.LOADED])
