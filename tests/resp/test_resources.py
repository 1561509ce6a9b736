# SPDX-License-Identifier: Apache-2.0
"""What moving data costs beside the data: no copies, no threads, no descriptors left."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    CONNECTIONS,
    Chunk,
    open_all,
    open_streams,
    plane_threads,
    read,
    running,
    wait_until,
    write,
)
from tests.resp.proxy import Proxy
from tests.servers import RedisServer

SLOT = (1 << 20) - 4096


def test_no_payload_is_copied(server: RedisServer) -> None:
    """A gigabyte moves; Python allocates less than a stripe the whole time."""
    chunks = [Chunk(n, 32 << 20, SLOT, seed=n) for n in range(2)]
    wanted = [chunk.content for chunk in chunks]
    with running(server.url) as plane:
        write(plane, *chunks)
        read(plane, *chunks)
        moved = 0
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(8):
                assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
                assert set(read(plane, *chunks)) == {ReadOutcome.LOADED}
                moved += 2 * sum(chunk.frame.chunk_bytes for chunk in chunks)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert moved >= 1 << 30
    assert peak - before < SLOT // 2, f"{peak - before} bytes allocated while moving {moved}"
    assert [chunk.content for chunk in chunks] == wanted


def test_nothing_piles_up_while_a_server_comes_and_goes(own_server: RedisServer) -> None:
    chunk = Chunk(1, 50_000, 4096, seed=1)
    with Proxy(own_server.port) as proxy, running(proxy.url) as plane:
        assert write(plane, chunk) == [WriteOutcome.STORED]
        open_all(plane)
        threads = sorted(plane_threads())
        for _ in range(5):
            proxy.cut_all()
            wait_until(lambda: read(plane, chunk) == [ReadOutcome.LOADED])
        wait_until(lambda: open_streams(plane) <= CONNECTIONS)
        assert sorted(plane_threads()) == threads
        assert not plane._jobs.transfers
        wait_until(lambda: not plane._jobs._jobs)


@pytest.mark.servers
def test_answered_jobs_hold_no_slots(tmp_path: Path) -> None:
    """An arena can only be unmapped when no view of it is left anywhere."""
    with RedisServer(tmp_path) as server, running(server.url) as plane:
        backing = bytearray(3 * 4096)
        chunk = Chunk(1, 3 * 4096, 4096, seed=1)
        view = memoryview(backing)
        chunk.slots = [view[at : at + 4096] for at in range(0, len(backing), 4096)]
        assert write(plane, chunk) == [WriteOutcome.STORED]
        server.stop()
        assert read(plane, chunk, within_s=0.05) == [ReadOutcome.TIMED_OUT]
        server.cont()
        wait_until(lambda: plane.state.up)
        assert read(plane, chunk) == [ReadOutcome.LOADED]
        for slot in chunk.slots:
            slot.release()
        chunk.slots = []
        view.release()
        # Raises BufferError where a view is still held.
        backing.clear()


def test_answered_bundles_hold_no_slots(own_server: RedisServer) -> None:
    with running(own_server.url) as plane:
        backing = bytearray(40 * 4096)
        chunks = [Chunk(number, 4096, 4096, seed=number) for number in range(40)]
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        view = memoryview(backing)
        for number, chunk in enumerate(chunks):
            chunk.slots = [view[number * 4096 :][:4096]]
        own_server.stop()
        assert set(read(plane, *chunks, within_s=0.05)) == {ReadOutcome.TIMED_OUT}
        own_server.cont()
        wait_until(lambda: plane.state.up)
        assert set(read(plane, *chunks)) == {ReadOutcome.LOADED}
        for chunk in chunks:
            chunk.slots[0].release()
        view.release()
        # Raises BufferError where a view is still held.
        backing.clear()


def test_descriptors_come_back(server: RedisServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with running(server.url) as plane:
            assert read(plane, Chunk(1, 100, 4096)) == [ReadOutcome.MISSING]
    assert len(os.listdir("/proc/self/fd")) == before
    assert plane_threads() == []
