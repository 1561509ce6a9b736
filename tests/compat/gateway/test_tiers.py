# SPDX-License-Identifier: Apache-2.0
"""Tiers behind a gateway: the real ones in one process, and some that fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import GET, KEY, PUT, SUCCESS, header, key
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

FORMS = [
    (24, 1, 3, (2, 3, 1, 2)), (24, 2, 2, (3, 2, 2, 0)), (9, 4, 0, (9, 0, 0, 0)),
    (9, 5, 6, (77, 0, 3, 0)), (4096, 1, 3, (3, 5, 7, 2)), (5, 0, 4, (0, 0, 0, 0)),
    (1_500_000, 3, 6, (1_500_000, 1, 0, 0)), (7, 6, 0, (1, 2, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("tiers", ["memory", "disk", "redis", "all"])
def test_whatever_a_request_says_is_in_the_reply(
    tmp_path: Path, server: RedisServer, tiers: str
) -> None:
    """But for the location: where it lies is the gateway's affair."""
    everything = tiers == "all"
    on_disk = tiers in ("disk", "all")
    settings = {
        "memory_bytes": 16 << 20 if everything or tiers == "memory" else 0,
        "disk_path": str(tmp_path / "disk") if on_disk else None,
        "disk_size": 16 << 20,
        "redis_url": server.url if everything or tiers == "redis" else None,
        "buffer_bytes": 16 << 20,
    }
    with Serving(None, **settings) as serving, serving.client() as client:
        for number, (length, fmt, dtype, shape) in enumerate(FORMS):
            payload = random.Random(number).randbytes(length)
            said = header(PUT, key(number), length, fmt, dtype, shape, location=number % 3)
            client.send(said + payload)
            client.send(header(GET, key(number), location=(number + 1) % 3))
            assert client.reply() == (SUCCESS, length, fmt, dtype, shape, 0)
            assert client.receive(length) == payload
        client.send(header(PUT, "m@1@0@ff@half"))
        assert not client.exists("m@1@0@ff@half"), "tiers have no chunks of no bytes"
        assert client.list() == {*map(key, range(len(FORMS)))}


def test_a_write_that_hangs_holds_up_no_client() -> None:
    tier = DictTier()
    with (
        Serving(tier, memory_bytes=1 << 20) as serving,
        serving.client() as client,
    ):
        tier.open.clear()
        tier.hangs_next = True
        client.put("m@1@0@01@half", b"1" * 5000)
        client.put("m@1@0@02@half", b"2" * 6000)
        assert not client.exists("m@1@0@03@half")
        assert client.get("m@1@0@01@half") == b"1" * 5000
        # Memory has them, but no tier does.
        serving.until(buffer_used_bytes=0, puts_not_stored=2)
        assert serving.call(lambda: serving.pool.pinned) == 0
        tier.hangs = False
        tier.open.set()


def test_a_load_that_fails_is_a_miss_and_holds_no_room(backend: DictTier) -> None:
    with Serving(backend) as serving, serving.client() as client:
        client.put(KEY, b"x" * 5000)
        assert client.exists(KEY)
        backend.is_damaged = True
        assert client.get(KEY) is None
        serving.until(gets_miss=1, buffer_used_bytes=0)


def test_a_put_that_there_is_no_memory_for_is_dropped() -> None:
    with Serving(DictTier()) as serving, serving.client() as client:
        serving.cache.reserve = lambda *_: None  # type: ignore[method-assign]
        client.put(KEY, bytes(500_000))
        assert client.get(KEY) is None
        serving.until(puts_not_stored=1, gets_miss=1, buffer_used_bytes=0, open_connections=1)


def test_memory_alone_is_healthy_and_a_disk_that_hangs_is_not() -> None:
    settings = {"memory_bytes": 1 << 20, "disk_path": None}
    with Serving(None, **settings) as serving, serving.client() as client:
        assert client.healthy()
    tiers = [DictTier(), DictTier()]
    with Serving(tiers) as serving, serving.client() as client:
        assert client.healthy()
        tiers[1].hangs = True
        assert not client.healthy()
        tiers[1].hangs = False
