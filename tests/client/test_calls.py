"""What becomes of calls, without a socket."""

from __future__ import annotations

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentCall, AgentCalls, CallState, lose


def test_an_answer_ends_its_call_alone() -> None:
    calls, ended = AgentCalls(), list[AgentCall]()
    one, other = calls.new(2, ended.append)
    calls.put([m.EndSession(0, "a"), m.EndSession(0, "b")], [one, other])
    for batch, _ in calls.take_queued():
        calls.sent(batch)
    assert one.sent
    assert other.sent
    calls.answered(m.Done(other.call_id))
    calls.answered(m.Done(999))
    assert ended == [other]
    assert (one.state, other.state) == (CallState.PENDING, CallState.ANSWERED)
    calls.answered(m.Done(other.call_id, 7))  # once
    assert other.answer == m.Done(other.call_id)


def test_queued_and_sent_calls_are_lost_together() -> None:
    calls, ended = AgentCalls(), list[AgentCall]()
    (sent,), (queued,) = calls.new(1, ended.append), calls.new(1, ended.append)
    calls.sent([sent])
    calls.put([m.EndSession(0, "b")], [queued])
    calls.lose_all()
    assert ended == [sent, queued]
    assert {call.state for call in ended} == {CallState.LOST}
    assert (sent.sent, queued.sent) == (True, False)
    calls.lose_all()
    lose(ended)
    assert len(ended) == 2  # each ends once
    assert [*calls.take_queued()] == []
