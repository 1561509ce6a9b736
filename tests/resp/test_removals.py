# SPDX-License-Identifier: Apache-2.0
"""A plane listens to what servers tell of removed keys, and asks again what nobody tells."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.resp import RedisOptions, RedisPlane, removals
from tests.harness import wait_until
from tests.resp.helpers import running
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

KEYS = [b"mine:lmcr2:" + number.to_bytes(4, "big") * 10 for number in range(3000)]


class Listener:
    def __init__(self, plane: RedisPlane) -> None:
        self.told: Counter[tuple[bytes, bool]] = Counter()
        self.begun = 0
        plane.removals.listen(self.removed, self.asked)

    def removed(self, keys: Sequence[bytes], certain: bool) -> None:
        self.told.update((key, certain) for key in keys)

    def asked(self) -> None:
        self.begun += 1


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    return RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex"))


def test_thousands_of_removals_are_told_once_each(server: RedisServer) -> None:
    with server, running(server.url, key_prefix=b"mine:") as plane:
        listener = Listener(plane)
        wait_until(lambda: listener.begun, "a subscription")
        client = server.client()
        client.mset({stripe_key(key, 0): b"x" for key in KEYS})
        pipeline = client.pipeline(transaction=False)
        for key in KEYS[:2000]:
            pipeline.pexpire(stripe_key(key, 0), 300)  # what has expired by then is deleted
        pipeline.execute()
        client.delete(*[stripe_key(key, 0) for key in KEYS[2000:]])
        time.sleep(0.35)
        client.exists(*[stripe_key(key, 0) for key in KEYS])  # expires what is due
        expected = {(key, number < 2000) for number, key in enumerate(KEYS)}
        wait_until(lambda: set(listener.told) == expected, "the news")
        assert set(listener.told.values()) == {1}
        plane.removals.stop()
        wait_until(lambda: not client.client_list(_type="pubsub"), "the end of the subscription")


def test_a_subscription_is_renewed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUSHALL tells nothing, nor does a server that was told to be silent."""
    monkeypatch.setattr(removals, "_RENEW_S", 0.2)
    monkeypatch.setattr(removals, "_ASK_AGAIN_S", 0.2)
    with server, running(server.url) as plane:
        listener = Listener(plane)
        wait_until(lambda: listener.begun > 2, "renewals")
        assert plane.removals.why_silent == ""
        server.config_set("notify-keyspace-events", "")
        wait_until(lambda: plane.removals.why_silent, "the reason")
        begun = listener.begun
        server.config_set("notify-keyspace-events", "EA")
        wait_until(lambda: listener.begun > begun, "another subscription")
        assert plane.removals.why_silent == ""


@pytest.mark.parametrize("listens", [False, True])
def test_a_plane_that_closes_ends_the_threads(server: RedisServer, listens: bool) -> None:
    with server:
        plane = RedisPlane(RedisOptions(server.url))
        plane.start()
        if listens:
            listener = Listener(plane)
            wait_until(lambda: listener.begun, "a subscription")
        began_s = time.monotonic()
        assert plane.close(5.0)
        assert time.monotonic() - began_s < 4
        assert not [each for each in threading.enumerate() if each.name == "lmcr-removals"]
