# SPDX-License-Identifier: Apache-2.0
"""Where no canary can run, `status` and `why` say so, with figures."""

from __future__ import annotations

import pytest

from lmcache_redis.agent.reports.words import not_compared
from tests.agent.starts import Starts
from tests.agent.test_canaries import BLOCKS, HASHES, TOKENS, canary, counts
from tests.cli.test_commands import run
from tests.servers import RedisServer


@pytest.mark.parametrize(
    ("every", "hits", "local", "compared", "expected"),
    [
        (0, 9, 9, 0, ""),
        (1000, 0, 0, 0, ""),
        (1000, 9, 9, 2, ""),
        (1000, 1234, 1234, 0, "none was compared: 1,234 hits, all of them behind a prefix"),
        (1000, 1234, 1000, 0, "none was compared: 1,234 hits, 1,000 of them behind a prefix"),
    ],
)
def test_what_is_said(every: int, hits: int, local: int, compared: int, expected: str) -> None:
    counters = {"loaded_hits": hits, "local_hits": local, "compared_chunks": compared}
    assert not_compared(every, counters).startswith(expected)
    assert bool(not_compared(every, counters)) == bool(expected)


@pytest.mark.servers
def test_hits_behind_a_local_prefix_are_counted(start: Starts, redis_server: RedisServer) -> None:
    url = redis_server.unix_url
    agent = start.agent(url=url, canary_every=1000)
    engine = start.engine(agent, world_size=2)
    engine.randomize(BLOCKS)
    engine.store("first", HASHES, BLOCKS)

    def load(request_id: str, first_chunk: int, skipped_tokens: int = 0) -> None:
        hashes = HASHES[4 * first_chunk :]
        assert engine.lookup(request_id, HASHES, first_chunk=first_chunk) == TOKENS
        blocks = range(16, 16 + len(hashes))
        assert engine.retrieve(request_id, hashes, blocks, skipped_tokens) == set()
        engine.scheduler.end_session(request_id)

    def figures() -> tuple[int, int]:
        return agent.counter("loaded_hits"), agent.counter("local_hits")

    def said() -> tuple[str, str]:
        shown = run("status", "--endpoint", agent.endpoint).stdout
        return shown, run("why", "--last", "--endpoint", agent.endpoint).stdout

    assert all("none was compared" not in each for each in said())
    load("behind a chunk", 1)
    load("behind a block", 0, 16)
    assert figures() == (2, 2)
    sentence = "none was compared: 2 hits, all of them behind a prefix that vLLM had itself"
    assert all(sentence in each for each in said())
    load("behind nothing", 0)
    assert figures() == (3, 2)
    assert all("3 hits, 2 of them behind" in each for each in said())
    # A lookup that is not loaded is no hit of an engine.
    engine.lookup("aborted", HASHES)
    engine.scheduler.end_session("aborted")
    assert figures() == (3, 2)
    expected = counts(4)
    assert canary(engine, agent) == expected
    load("behind a chunk again", 1)
    assert all("none was compared" not in each for each in said())
