# SPDX-License-Identifier: Apache-2.0
"""A cache over a real Redis and a real directory: each chunk is found intact, or is a miss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import DISK, REDIS
from tests.cache.played import FORM, HASHES, World, loaded_from
from tests.harness import wait_until
from tests.servers import RedisServer, stripe_keys


class Both(World):
    """A cache over a directory and Redis."""

    def __init__(self, directory: Path, server: RedisServer) -> None:
        plane = RedisPlane(RedisOptions(server.url))
        plane.start()
        plane.wait_probed(10)
        self.disk, self.redis = DiskTier(directory, 1 << 20), plane
        super().__init__([(self.disk, DISK), (self.redis, REDIS)])

    def store(self) -> None:
        for name in HASHES:
            self.cache.write_behind(self.hold(name))
        self.run(lambda: not self.cache.backlog)

    def look_up(self) -> dict[str, int]:
        """The tiers that the chunks came from; checks their bytes."""
        found: list[dict[str, int]] = []

        def done(lookup: PrefixLookup) -> None:
            found.append({"all": lookup.bound, **loaded_from(lookup)})
            for (chunk, _), entry in lookup.parts.take().items():
                payload = b"".join(self.cache.views(entry))
                assert payload == HASHES[chunk][:1] * FORM.chunk_bytes
                self.cache.pool.unpin(entry)

        request = LookupRequest([FORM], HASHES, time.monotonic() + 15)
        PrefixLookup(self.cache, request, done).start()
        self.run(lambda: found)
        self.run(lambda: not self.cache.backlog)
        return found[0]


@pytest.fixture
def both(tmp_path: Path, server: RedisServer) -> Iterator[Both]:
    both = Both(tmp_path / "disk", server)
    yield both
    assert both.cache.close(5.0)
    both.loop.run_posted()
    both.close()


def test_chunks_come_back_from_disk_and_from_redis(both: Both, server: RedisServer) -> None:
    both.store()
    assert both.look_up() == {"all": 5, "disk": 0, "Redis": 0}
    both.cache.pool.clear()
    assert both.look_up() == {"all": 5, "disk": 5, "Redis": 0}
    both.cache.pool.clear()
    for name in HASHES[:3]:
        both.disk.clear([FORM.key(name)], time.monotonic() + 10, lambda result: None)
        wait_until(lambda name=name: not both.disk.lookup(FORM.key(name)))
    server.command("DEL", *[FORM.key(name) + b"\0\1" for name in HASHES[3:]])
    assert both.look_up() == {"all": 5, "disk": 2, "Redis": 3}
    # Chunks loaded from Redis are on disk again.
    assert all(both.disk.lookup(FORM.key(name)) for name in HASHES)


def test_a_damaged_file_is_read_from_redis(both: Both) -> None:
    both.store()
    both.cache.pool.clear()
    for path in Path(both.disk.directory).rglob("*.lmcr"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert both.look_up() == {"all": 5, "disk": 0, "Redis": 5}
    assert both.counted("miss_") == {"miss_disk": 5}


def test_what_a_tier_has_is_not_written_again(both: Both) -> None:
    both.store()
    both.cache.pool.clear()
    both.store()
    assert both.counted("skipped") == {"skipped_chunks": 5}
    assert both.counted("stored_chunks") == {"stored_chunks": 5}
    assert both.counted("disk_stored_chunks") == {"disk_stored_chunks": 5}


def test_a_clear_removes_a_prefix_of_names_from_every_tier(both: Both, server: RedisServer) -> None:
    both.store()
    assert both.cache.clear([FORM.key(name) for name in HASHES[:2]]) == 2
    both.run(lambda: both.counted("cleared_keys") == {"cleared_keys": 6})
    both.run(lambda: not any(both.disk.lookup(FORM.key(name)) for name in HASHES[:2]))
    assert both.disk.lookup(FORM.key(HASHES[2]))
    assert len(stripe_keys(server)) == 9
    assert both.cache.clear([FORM.names.common]) == 3
    wait_until(lambda: len(stripe_keys(server)) == 0)
    both.run(lambda: both.counted("cleared_keys") == {"cleared_keys": 15})
    assert both.look_up() == {"all": 0, "disk": 0, "Redis": 0}


def test_a_clear_that_fails_is_counted_and_said(
    both: Both, own_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Both(tmp_path / "other", own_server)
    own_server.kill()
    wait_until(lambda: not other.redis.state.up)
    other.cache.clear([FORM.names.common])
    other.run(lambda: other.counted() == {"clears_failed": 1})
    assert "chunks of an old epoch stay in Redis" in caplog.text
    other.cache.close(1.0)
