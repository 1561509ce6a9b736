# SPDX-License-Identifier: Apache-2.0
"""Workers against a real server: every client moves bytes, and none can hang the benchmark."""

from __future__ import annotations

import time

import pytest

from benchmarks.plane.messages import Batch, Load, PrepareScan, Scan, Setting, Store
from benchmarks.plane.peers import LMCACHE, OURS, why_left_out
from benchmarks.plane.process import WorkerFailed, WorkerProcess
from tests.servers import RedisServer, free_port

BATCH = Batch(value_bytes=64 << 10, items=5)


def test_what_is_not_there_is_no_load_and_no_hit(redis_server: RedisServer) -> None:
    with WorkerProcess(OURS, redis_server.url) as worker:
        worker.ask(Store(Setting(slot_bytes=16 << 10), BATCH, "gone", fresh=True))
        assert redis_server.command("DBSIZE") == 4 * BATCH.items
        redis_server.command("FLUSHALL")
        with pytest.raises(WorkerFailed, match="5 of 5 chunks failed"):
            worker.ask(Load(Setting(), BATCH, "gone"))
        with pytest.raises(WorkerFailed):
            worker.ask(Store(Setting(), BATCH, "gone", fresh=True))
    with WorkerProcess(OURS, redis_server.url) as worker:
        worker.ask(PrepareScan(Setting(), 100, 100))
        with pytest.raises(WorkerFailed, match="found 100 of 99 keys"):
            worker.ask(Scan(Setting(), 99))


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
    if (reason := why_left_out(LMCACHE, redis_server.url)) is not None:
        pytest.skip(f"needs {LMCACHE}: {reason}")
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
