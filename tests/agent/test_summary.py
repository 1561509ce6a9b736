# SPDX-License-Identifier: Apache-2.0
"""The line that an agent logs once a minute, and the lines that it does not log."""

from __future__ import annotations

import logging

from lmcache_redis.agent.agent import summary
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.metrics import Metrics
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

HASHES = block_hashes("prompt", 8)


def grown(**counters: int) -> tuple[int, str] | None:
    metrics = Metrics()
    metrics.count("miss_corrupt", 5)  # of an earlier minute
    before = metrics.snapshot()
    for name, n in counters.items():
        metrics.count(name, n)
    return summary(before, metrics.snapshot())


def test_nothing_is_said_of_nothing() -> None:
    assert grown() is None
    assert grown(registrations=1, loaded_bytes=7) is None


def test_everything_that_happened_is_one_line() -> None:
    line = grown(
        lookups=3, lookup_chunks=10, hit_chunks_host=4, hit_chunks_redis=2, miss_absent=3,
        miss_incomplete=1, retrieved_chunks=6, gathered_chunks=4, stored_chunks=2,
        drop_queue_full=2, sessions_ended=3,
    )  # fmt: skip
    assert line == (
        logging.INFO,
        "since the last such line: lookups 3, lookup_chunks 10, retrieved_chunks 6, "
        "gathered_chunks 4, hit_chunks_host 4, hit_chunks_redis 2, miss_absent 3, "
        "miss_incomplete 1, drop_queue_full 2, stored_chunks 2",
    )


def test_what_eviction_does_not_cause_is_a_warning() -> None:
    for name in ("miss_corrupt", "miss_foreign", "wire_errors"):
        line = grown(**{name: 2})
        assert line == (logging.WARNING, f"since the last such line: {name} 2")


def test_eviction_and_requests_log_no_lines_of_their_own(
    agent: AgentServer, redis_server: RedisServer
) -> None:
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r0", HASHES, range(8))
        agent.wait_idle()
        agent.restart()
        engine.wait_ready()
        before = agent.log
        with redis_server.client() as client:
            tag = hash_tag(HASHES[7])
            for key in sorted(key for key in stripe_keys(client) if tag in key)[1:]:
                client.delete(key)
        for number in range(10):
            engine.lookup(f"r{number}", HASHES)
            engine.scheduler.end_session(f"r{number}")
        wait_until(lambda: agent.counter("miss_incomplete") > 0, what="an incomplete chunk")
        wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")
        assert agent.log == before
        assert agent.terminate() == 0
    said = agent.log.removeprefix(before)
    assert said.count("since the last such line") == 1  # at the end
    assert "lookups 10" in said
    assert "miss_incomplete 1" in said
