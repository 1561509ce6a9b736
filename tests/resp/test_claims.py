# SPDX-License-Identifier: Apache-2.0
"""Several writers of one prompt at the same time, on real servers: one of them stores a chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from lmcache_redis.cache import schedule
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, claim_key, opaque_pages, stripe_key
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import CallOutcome, ChunkIO, ExistsResult, ReadOutcome, WriteDone
from tests.acl import PASSWORD
from tests.cache.played import World, run_until
from tests.harness import WAIT_S, block_hashes, wait_until
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

WRITERS = 16
HASHES = block_hashes("prompt", 16)
# Eight stripes.
FORM = ChunkForm.of(ChunkNames(bytes(32)), "test/model", 0, opaque_pages(8 * 64), 64)


class Writer(World):
    """An agent's cache, with the prompt in its pool: bytes of its own, to be told apart."""

    def __init__(self, url: str, number: int, stack: ExitStack) -> None:
        self.plane = _plane(url, stack)
        super().__init__([(self.plane, REDIS)], slots=16 * 8 * 2)
        self.entries = []
        for name in HASHES:
            entry = self.cache.reserve(FORM, name)
            assert entry is not None
            for view in self.cache.views(entry):
                view[:] = bytes([number]) * len(view)
            assert self.cache.publish(entry)
            self.entries.append(entry)

    def begin(self) -> None:
        for entry in self.entries:
            self.cache.write_behind(entry)

    def end(self) -> None:
        run_until(self.loop, lambda: not self.cache.backlog)
        self.loop.run_posted()  # claims are given back

    def store(self) -> None:
        self.begin()
        self.end()


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def loaded(url: str) -> list[tuple[ReadOutcome, set[int]]]:
    """Of each chunk: how its load ends, and whose bytes it has."""
    with ExitStack() as stack:
        reader = World([(_plane(url, stack), REDIS)], slots=16 * 8)
        jobs = [
            job
            for name in HASHES
            if (job := reader.cache.prepare_load(FORM, name, 0, time.monotonic() + WAIT_S))
        ]
        outcomes: dict[bytes, ReadOutcome] = {}
        reader.cache.tiers[0].load_all(
            jobs, lambda job, outcome: outcomes.__setitem__(job.key, outcome)
        )
        run_until(reader.loop, lambda: len(outcomes) == len(jobs) == len(HASHES))
        return [
            (outcomes[job.key], {byte for view in job.slots for byte in bytes(view)})
            for job in jobs
        ]


def _plane(url: str, stack: ExitStack) -> RedisPlane:
    """Nobody gives up because a busy machine lets the server, or these many threads, wait."""
    plane = RedisPlane(RedisOptions(url, connect_timeout_s=WAIT_S, op_timeout_s=WAIT_S))
    plane.start()
    stack.callback(plane.close, 0.0)
    assert plane.wait_probed(WAIT_S).up
    return plane


def refreshed(plane: RedisPlane, claim_s: float = 0.0) -> ExistsResult:
    found: list[ExistsResult] = []
    chunks = [(FORM.key(name), FORM.stripe_count) for name in HASHES]
    plane.refresh(chunks, time.monotonic() + WAIT_S, found.append, claim_s)
    wait_until(lambda: found, "an answer", WAIT_S)
    return found[0]


def test_each_chunk_is_stored_whole_by_one_of_many(url: str, stack: ExitStack) -> None:
    writers = [Writer(url, number, stack) for number in range(WRITERS)]
    threads = [threading.Thread(target=writer.store) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    found = loaded(url)
    assert [outcome for outcome, _ in found] == [ReadOutcome.LOADED] * len(HASHES)
    assert {len(whose) for _, whose in found} == {1}
    stored = sum(writer.counted().get("stored_chunks", 0) for writer in writers)
    # In a cluster a claim and its chunk are on two nodes: both answers may cross the writer's end.
    most = 1.2 if "cluster" not in url else 1.5
    assert len(HASHES) <= stored <= most * len(HASHES)
    # Nobody gave up: the others found the chunks there.
    assert [writer.counted("drop_") for writer in writers] == [{}] * WRITERS


def test_a_claim_has_one_holder_and_expires(url: str, stack: ExitStack) -> None:
    first, second = _plane(url, stack), _plane(url, stack)
    absent, every = [False] * len(HASHES), (True,) * len(HASHES)
    assert refreshed(first, 0.5) == (CallOutcome.DONE, absent, every)
    assert refreshed(second, 0.5) == (CallOutcome.DONE, absent, (False,) * len(HASHES))
    assert refreshed(second) == (CallOutcome.DONE, absent, ())
    time.sleep(0.6)
    assert refreshed(second, 0.5) == (CallOutcome.DONE, absent, every)


def test_a_claim_is_given_back_when_the_chunk_is_there(url: str, stack: ExitStack) -> None:
    """Who has removed it may store it again at once, and anybody else."""
    first, second = Writer(url, 1, stack), Writer(url, 2, stack)
    first.store()
    second.store()  # finds them there
    assert second.counted() == {"skipped_chunks": len(HASHES)}
    for name in HASHES:
        ended: list[object] = []
        first.plane.remove(FORM.key(name), time.monotonic() + WAIT_S, ended.append)
        wait_until(lambda ended=ended: ended, "a removal", WAIT_S)
    second.store()
    assert second.counted()["stored_chunks"] == len(HASHES)
    assert not second.counted("drop_")


def test_a_claim_that_has_run_out_makes_no_chunk_visible(
    server: RedisServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is held up for longer: what it was sent stays invisible."""
    monkeypatch.setattr(schedule, "_LEAST_CLAIM_S", 0.4)
    monkeypatch.setattr(schedule, "_MOST_CLAIM_S", 0.4)
    late = Writer(server.url, 1, stack)
    late.begin()
    claim = claim_key(FORM.key(HASHES[0]), b"")
    store_all = late.plane.store_all

    def held_up(jobs: Sequence[ChunkIO], done: WriteDone) -> None:
        assert server.command("EXISTS", claim)
        server.stop()
        store_all(jobs, done)

    monkeypatch.setattr(late.plane, "store_all", held_up)
    try:
        late.end()
    finally:
        server.cont()
    assert late.counted() == {"drop_redis_error": len(HASHES)}
    assert not server.command("EXISTS", stripe_key(FORM.key(HASHES[0]), 0))


def test_who_may_not_claim_stores_all_the_same(server: RedisServer, stack: ExitStack) -> None:
    """A user with rights for the keys of chunks alone."""
    server.command("ACL", "SETUSER", "old", "reset", "on", f">{PASSWORD}", "+@all", "~lmcr2:0*")
    writer = Writer(f"redis://old:{PASSWORD}@127.0.0.1:{server.port}", 1, stack)
    writer.store()
    assert writer.counted()["stored_chunks"] == len(HASHES)
