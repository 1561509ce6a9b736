# SPDX-License-Identifier: Apache-2.0
"""What lookups tell the agent of the requests that the engine has begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentCall
from lmcache_redis.client.scheduler import SchedulerClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SchedulerClient]:
    """Without an agent."""
    made = SchedulerClient(f"ipc://{tmp_path}/agent.sock", "model", 1, 16, engine_id="engine")
    yield made
    made.shutdown()


def test_each_lookup_names_those_begun_since_the_last_one(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[m.Lookup] = []

    def submit_all(questions: Sequence[m.Message], listener: Any = None) -> Sequence[AgentCall]:
        asked.extend(each for each in questions if isinstance(each, m.Lookup))
        return client.link.lost(len(questions))

    monkeypatch.setattr(client.link, "submit_all", submit_all)

    def look_up(name: str) -> tuple[str, ...]:
        client.begin_lookup(name, [b"hash"], token_s=0.5, busy_s=1.5)
        assert (asked[-1].token_s, asked[-1].busy_s) == (0.5, 1.5)
        return asked[-1].begun

    assert look_up("first") == ()
    assert look_up("second") == ()
    client.forget_lookup("first")
    client.forget_lookup("without a lookup")
    assert look_up("third") == ("first",)
    client.forget_lookup("third")
    client.forget_lookup("second")
    client.end_session("third")  # the message says it
    assert look_up("fourth") == ("second",)
    assert look_up("fifth") == ()
