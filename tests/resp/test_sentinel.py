# SPDX-License-Identifier: Apache-2.0
"""A real Sentinel: the master found by name, fail-over followed, a stale master left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    chunk_key,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.topologies import Watched, info, running_sentinel

pytestmark = pytest.mark.servers

SLOT = 4096


def test_a_failover_is_followed_and_the_stale_master_left(watched: Watched) -> None:
    old, new = watched.servers
    chunk = Chunk(1, 50_000, SLOT, seed=1)
    with running(watched.url) as plane:
        assert plane.state.up
        check_stores(plane, chunk)
        assert old.command("DBSIZE") == chunk.stripe_count
        wait_until(lambda: new.command("DBSIZE") == chunk.stripe_count)
        watched.fail_over()
        wait_until(lambda: info(new, "replication").get("role") == "master")
        wait_until(lambda: read(plane, chunk.empty()) == [ReadOutcome.LOADED])
        check_loads(plane, chunk)
        wait_until(lambda: write(plane, chunk) == [WriteOutcome.STORED])
        # The old one is a replica now, which refuses writes: nothing is sent there any more.
        wait_until(lambda: info(old, "replication").get("role") == "slave")
        wait_until(lambda: old.command("CLIENT", "LIST").count(b"lmcache-redis:") == 0)
        check_stores(plane, chunk)
        assert scan(plane, [chunk_key(1)]) == (CallOutcome.DONE, 1)
        watched.stop_sentinel()  # known servers stay in use while nobody can be asked
        check_moves(plane, Chunk(2, 5000, SLOT, seed=2))


def test_a_master_that_dies_is_replaced(watched: Watched) -> None:
    old, new = watched.servers
    chunk = Chunk(1, 50_000, SLOT, seed=1)
    # Sooner than Sentinel: the plane would see nothing but a new master otherwise.
    with running(watched.url, heartbeat_s=0.2) as plane:
        check_stores(plane, chunk)
        wait_until(lambda: new.command("DBSIZE") == chunk.stripe_count)
        old.kill()
        wait_until(lambda: not plane.state.up)
        assert read(plane, chunk.empty()) == [ReadOutcome.UNAVAILABLE]
        wait_until(lambda: plane.state.up)
        check_loads(plane, chunk)
        check_stores(plane, chunk)


def test_no_such_master(watched: Watched) -> None:
    with running(watched.url.replace("mymaster", "other")) as plane:
        assert not plane.state.up
        assert "watches no master named other" in plane.state.reason
        assert plane.deployment.url == f"redis+sentinel://127.0.0.1:{watched.port}/other"


def test_no_sentinel_there() -> None:
    with running("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster") as plane:
        assert not plane.state.up
        assert re.search("127.0.0.1:[12] refuses connections", plane.state.reason)
        assert read(plane, Chunk(1, 5000, SLOT)) == [ReadOutcome.UNAVAILABLE]


def test_passwords_of_master_and_sentinel_are_apart(tmp_path: Path) -> None:
    with running_sentinel(tmp_path, password="of the master") as watched:
        url = watched.url.replace("of the master", "of%20the%20master")
        with running(url) as plane:
            check_stores(plane, Chunk(1, 5000, SLOT))
        watched.sentinel("ACL", "SETUSER", "default", "resetpass", ">of the sentinel")
        with running(url) as plane:
            assert not plane.state.up
            assert "wants a password" in plane.state.reason
            assert "of the" not in repr(plane.options) + plane.state.reason + plane.deployment.url
        with running(url + "?sentinel_password=of+the+sentinel") as plane:
            check_stores(plane, Chunk(1, 5000, SLOT))
