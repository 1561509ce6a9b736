"""Writing behind: when chunks begin their way to Redis, and what they hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_redis.agent.timers import Timers
from lmcache_redis.agent.writes import Writes
from lmcache_redis.hostpool import HostPool
from lmcache_redis.metrics import Metrics
from tests.agent.played import Device, Played


@pytest.mark.parametrize("on_host_cores", [True, False])
def test_chunks_wait_only_where_the_engine_computes_on_the_same_cores(on_host_cores: bool) -> None:
    played, written = Played(Device()), []
    played.registration.device.on_host_cores = on_host_cores
    played.core.config.write_queue_limit_bytes = 100
    played.core.plane = SimpleNamespace(
        state=SimpleNamespace(up=True), write_all=lambda ios, done: written.extend(ios)
    )
    played.core.chunk_io = lambda form, chunk_hash, entry, deadline_s: SimpleNamespace(
        tag=entry, frame=SimpleNamespace(chunk_bytes=form.chunk_bytes)
    )
    (entry,) = played.hold(b"a")
    writes = Writes(played.core)
    writes.offer(played.registration, b"a", entry)
    played.timers.run_due()
    assert len(written) == (0 if on_host_cores else 1)
    writes.begin_all()
    assert [io.tag for io in written] == [entry]


def test_a_write_that_cannot_begin_gives_back_what_it_held() -> None:
    pool, timers, metrics = HostPool(2), Timers(), Metrics()
    entry = pool.reserve(b"key", 1)
    assert entry is not None
    pool.publish(entry)

    def write_all(ios: object, done: object) -> None:
        raise RuntimeError("a bug")

    core = SimpleNamespace(
        pool=pool,
        timers=timers,
        metrics=metrics,
        config=SimpleNamespace(write_queue_limit_bytes=100),
        plane=SimpleNamespace(state=SimpleNamespace(up=True), write_all=write_all),
        chunk_io=lambda form, chunk_hash, entry, deadline_s: SimpleNamespace(
            tag=entry, frame=SimpleNamespace(chunk_bytes=form.chunk_bytes)
        ),
    )
    writes = Writes(core)  # type: ignore[arg-type]
    registration = SimpleNamespace(
        form=SimpleNamespace(chunk_bytes=60), device=SimpleNamespace(on_host_cores=True)
    )
    writes.offer(registration, b"h", entry)  # type: ignore[arg-type]
    assert (len(writes), writes.queued_bytes, entry.pins) == (1, 60, 2)
    with pytest.raises(RuntimeError, match="a bug"):
        writes.begin_all()
    assert (len(writes), writes.queued_bytes, entry.pins) == (0, 0, 1)
    assert metrics.snapshot()["drop_redis_error"] == 1
