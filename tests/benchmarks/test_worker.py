# SPDX-License-Identifier: Apache-2.0
"""Workers against a real server: every client moves bytes, and none can hang the benchmark."""

from __future__ import annotations

import time

import pytest

from benchmarks.plane.messages import (
    Batch,
    Load,
    Measured,
    PrepareScan,
    Scan,
    Setting,
    Store,
)
from benchmarks.plane.peers import (
    CEILING,
    GLIDE,
    LMCACHE,
    OURS,
    REDIS_PY,
    settings_of,
    why_left_out,
)
from benchmarks.plane.process import WorkerFailed, WorkerProcess
from tests.servers import RedisServer, free_port

BATCH = Batch(value_bytes=64 << 10, items=5)
SETTINGS = [
    (OURS, Setting()),
    (OURS, Setting(2, slot_bytes=16 << 10)),
    (OURS, Setting(checksums=False)),
    *((peer, setting) for peer in (LMCACHE, GLIDE) for setting in settings_of(peer, (3,))),
    *((peer, setting) for peer in (REDIS_PY, CEILING) for setting in settings_of(peer, (1, 2))),
]


def need(client: str, url: str) -> None:
    reason = why_left_out(client, url)
    if reason is not None:
        pytest.skip(f"needs {client}: {reason}")


@pytest.mark.parametrize(("client", "setting"), SETTINGS)
def test_a_client_stores_and_loads(
    redis_server: RedisServer, client: str, setting: Setting
) -> None:
    need(client, redis_server.url)
    redis_server.command("FLUSHALL")
    with WorkerProcess(client, redis_server.url) as worker:
        for name in ("a", "b"):
            for fresh in (True, False):
                assert worker.ask(Store(setting, BATCH, name, fresh)).elapsed_s > 0
            # The worker itself compares what came with what was stored.
            assert worker.ask(Load(setting, BATCH, name)).elapsed_s > 0
    stored = redis_server.command("DBSIZE")
    stripes = 4 if setting.slot_bytes == 16 << 10 else 1
    assert stored == (0 if client == CEILING else 2 * BATCH.items * stripes)


@pytest.mark.parametrize("client", [OURS, LMCACHE, REDIS_PY])
def test_a_client_scans(redis_server: RedisServer, client: str) -> None:
    need(client, redis_server.url)
    setting = Setting() if client == OURS else settings_of(client, (2,))[0]
    with WorkerProcess(client, redis_server.url) as worker:
        for present in (0, 50, 100):
            redis_server.command("FLUSHALL")
            assert worker.ask(PrepareScan(setting, 100, present)) == Measured()
            assert worker.ask(Scan(setting, present)).elapsed_s > 0
        with pytest.raises(WorkerFailed, match="found 100 of 99 keys"):
            worker.ask(Scan(setting, 99))


def test_values_that_are_gone_are_no_load(redis_server: RedisServer) -> None:
    with WorkerProcess(OURS, redis_server.url) as worker:
        worker.ask(Store(Setting(), BATCH, "gone", fresh=True))
        redis_server.command("FLUSHALL")
        with pytest.raises(WorkerFailed, match="5 of 5 chunks failed"):
            worker.ask(Load(Setting(), BATCH, "gone"))
        with pytest.raises(WorkerFailed):
            worker.ask(Store(Setting(), BATCH, "gone", fresh=True))


@pytest.mark.servers
def test_without_a_server_a_worker_says_so() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with (
        WorkerProcess(OURS, url) as worker,
        pytest.raises(WorkerFailed, match="RedisUnavailable"),
    ):
        worker.ask(Store(Setting(), BATCH, "a", fresh=True))


def test_a_client_that_hangs_is_ended(redis_server: RedisServer) -> None:
    """LMCache's client never answers for a key that does not exist."""
    need(LMCACHE, redis_server.url)
    setting = Setting(1)
    with WorkerProcess(LMCACHE, redis_server.url) as worker:
        worker.ask(Store(setting, BATCH, "gone", fresh=True))
        redis_server.command("FLUSHALL")
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.5 s"):
            worker.ask(Load(setting, BATCH, "gone"), within_s=0.5)
        started_s = time.monotonic()
    # Closing it ends it well before LMCache's client would.
    assert time.monotonic() - started_s < 60
    worker.close()
