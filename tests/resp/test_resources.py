# SPDX-License-Identifier: Apache-2.0
"""What moving data costs beside the data: no copies, no threads, no descriptors left."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import Chunk, read, running, wait_until, write
from tests.servers import RedisServer

SLOT = (1 << 20) - 4096


def test_no_payload_is_copied(server: RedisServer) -> None:
    """Python allocates less than a stripe while 256 MiB move."""
    chunks = [Chunk(n, 16 << 20, SLOT, seed=n) for n in range(2)]
    wanted = [chunk.content for chunk in chunks]
    with running(server.url) as plane:
        write(plane, *chunks)
        read(plane, *chunks)
        moved = 0
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(4):
                assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
                assert set(read(plane, *chunks)) == {ReadOutcome.LOADED}
                moved += 2 * sum(chunk.frame.chunk_bytes for chunk in chunks)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert moved >= 1 << 28
    assert peak - before < SLOT // 2, f"{peak - before} bytes allocated while moving {moved}"
    assert [chunk.content for chunk in chunks] == wanted


@pytest.mark.servers
def test_answered_jobs_hold_no_slots(tmp_path: Path) -> None:
    """An arena can only be unmapped when no view of it is left anywhere."""
    with RedisServer(tmp_path) as server, running(server.url) as plane:
        # Some of several stripes, and many of one, which move together.
        sizes = [3 * 4096] * 2 + [4096] * 40
        chunks = [Chunk(number, size, 4096, seed=number) for number, size in enumerate(sizes)]
        backing = bytearray(sum(sizes))
        rest = view = memoryview(backing)
        for chunk in chunks:
            chunk.slots = [rest[at : at + 4096] for at in range(0, chunk.frame.chunk_bytes, 4096)]
            rest = rest[chunk.frame.chunk_bytes :]
        assert set(write(plane, *chunks)) == {WriteOutcome.STORED}
        server.stop()
        assert set(read(plane, *chunks, within_s=0.05)) == {ReadOutcome.TIMED_OUT}
        server.cont()
        wait_until(lambda: plane.state.up)
        assert set(read(plane, *chunks)) == {ReadOutcome.LOADED}
        for chunk in chunks:
            for slot in chunk.slots:
                slot.release()
        rest.release()
        view.release()
        # Raises BufferError where a view is still held.
        backing.clear()
