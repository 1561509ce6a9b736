# SPDX-License-Identifier: Apache-2.0
"""Names of tiers and of what is counted of them. Others have dashboards of them."""

from __future__ import annotations

from lmcache_redis.tier_kinds import DISK, HOST, KINDS, REDIS
from lmcache_redis.tiers import ReadOutcome, TierCounters, WriteOutcome


def test_no_two_kinds_are_called_the_same() -> None:
    assert KINDS[0] is HOST
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert len({kind.letter for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.name.isidentifier()
        assert len(kind.letter) == 1


def test_a_kind_counts_under_its_name() -> None:
    disk = TierCounters.of(DISK)
    assert (disk.loaded_chunks, disk.stored_bytes) == ("disk_loaded_chunks", "disk_stored_bytes")
    assert (disk.load_seconds, disk.load_rate) == ("disk_load_seconds", "disk_load_rate")
    assert {*disk.misses.values(), disk.silent} == {"miss_disk"}
    assert {*disk.drops.values(), disk.queue_full} == {"drop_disk"}


def test_redis_was_first() -> None:
    """So its counters have no prefix, and its reasons names of their own."""
    redis = TierCounters.of(REDIS)
    assert (redis.loaded_chunks, redis.stored_bytes) == ("loaded_chunks", "stored_bytes")
    assert redis.load_seconds == "redis_load_seconds"
    assert redis.misses == {
        ReadOutcome.MISSING: "miss_absent",
        ReadOutcome.TORN: "miss_mixed_stores",
        ReadOutcome.INCOMPLETE: "miss_incomplete",
        ReadOutcome.CORRUPT: "miss_corrupt",
        ReadOutcome.FOREIGN: "miss_foreign",
        ReadOutcome.NOT_OPENED: "miss_sealed",
        ReadOutcome.TIMED_OUT: "miss_deadline",
        ReadOutcome.UNAVAILABLE: "miss_redis_error",
    }
    drops = {**redis.drops}
    assert drops.pop(WriteOutcome.FULL) == "drop_redis_full"
    assert drops.pop(WriteOutcome.CANCELLED) == "drop_shutdown"
    assert {*drops.values()} == {"drop_redis_error"}
    assert (redis.silent, redis.queue_full) == ("miss_redis_silent", "drop_queue_full")
