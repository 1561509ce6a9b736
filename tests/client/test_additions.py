"""A scheduler that knows more questions than its agent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lmcache_redis import messages as m
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from tests.client.test_link import WAIT_S, Agent

BLOCK = 16


def test_an_agent_that_does_not_tell_the_tiers_is_used_as_before(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    scheduler = LMCacheMPSchedulerAdapter(
        agent.endpoint, "m", 1, BLOCK, engine_id="e", agent_dead_after_s=WAIT_S, wants_tiers=True
    )
    try:
        (hello,) = agent.receive()
        agent.answer(m.Welcome(hello.call_id, "agent", 1, 2, BLOCK, WAIT_S, "0"))
        (want,) = agent.receive()
        assert isinstance(want, m.WantTiers)
        agent.answer(m.Failure(want.call_id, m.BAD_MESSAGE, "Invalid value 'WANT_TIERS'"))
        for number in range(2):
            request = f"r{number}"
            scheduler.maybe_submit_lookup_request(request, block_hashes=[b"a" * 32, b"b" * 32])
            (lookup,) = agent.receive()
            assert isinstance(lookup, m.Lookup)
            # The bytes of an agent without ``tiers``.
            answer = {"type": "LOOKUP_RESULT", "call_id": lookup.call_id, "hit_chunks": 2}
            frames = [agent.peer, m.PREAMBLE, msgspec.msgpack.encode(answer)]
            agent.router.send_multipart(frames)
            assert scheduler.check_lookup_result(request, wait_s=WAIT_S) == 2 * BLOCK
            assert scheduler.hit_tiers(request) == []
        assert scheduler.link.online
    finally:
        scheduler.shutdown()
        agent.close()
