# SPDX-License-Identifier: Apache-2.0
"""What a link sends, to a socket that stands in for an agent's."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.client import link as link_module
from lmcache_redis.client import news
from lmcache_redis.client.link import AgentCall, AgentCalls, AgentLink, lose
from tests.client.stand_in import WAIT_S, Agent, welcome
from tests.servers import wait_until

HELLO = m.Hello(0, "e", "m", 1, 0, "0")


@pytest.fixture
def link(agent: Agent) -> Iterator[AgentLink]:
    link = AgentLink(agent.endpoint, HELLO, dead_after_s=WAIT_S)
    agent.welcome(link)
    yield link
    link.close()


def test_questions_go_in_one_message_and_are_answered_one_by_one(
    agent: Agent, link: AgentLink
) -> None:
    calls = link.submit_all([m.EndSession(0, name) for name in "abc"])
    received = agent.receive()
    assert received == [
        m.EndSession(call.call_id, name) for call, name in zip(calls, "abc", strict=True)
    ]
    agent.answer(m.Done(calls[1].call_id, 7))
    assert calls[1].wait(WAIT_S)
    assert calls[1].answer == m.Done(calls[1].call_id, 7)
    assert [call.done for call in calls] == [False, True, False]
    assert all(call.sent for call in calls)


def test_very_many_questions_go_in_a_few_messages(agent: Agent, link: AgentLink) -> None:
    calls = link.submit_all([m.EndSession(0, "r") for _ in range(2 * m.MAX_BATCH + 1)])
    received = [agent.receive() for _ in range(3)]
    assert [len(each) for each in received] == [m.MAX_BATCH, m.MAX_BATCH, 1]
    assert [q.call_id for each in received for q in each] == [call.call_id for call in calls]


def test_a_batch_without_an_agent_is_lost_whole(agent: Agent, link: AgentLink) -> None:
    waiting = link.submit_all([m.EndSession(0, "a"), m.EndSession(0, "b")])
    agent.receive()
    link.close()
    late = link.submit_all([m.EndSession(0, "c"), m.EndSession(0, "d")])
    assert all(call.lost for call in waiting + late)
    assert [call.sent for call in waiting + late] == [True, True, False, False]
    assert link.submit_all([]) == []


def test_who_waits_sees_what_the_listener_changed(agent: Agent, link: AgentLink) -> None:
    changed: list[AgentCall] = []

    def slowly(call: AgentCall) -> None:
        time.sleep(0.05)
        changed.append(call)

    call = link.submit(m.EndSession, slowly, request_id="r")
    agent.receive()
    agent.answer(m.Done(call.call_id))
    began_s = time.monotonic()
    assert link.wait_for(lambda: changed == [call], WAIT_S)
    assert time.monotonic() - began_s < WAIT_S / 2


def test_the_link_waits_for_an_agent_that_says_it_maps(agent: Agent, tmp_path: Path) -> None:
    """Until it says that it has ended."""
    link = AgentLink(agent.endpoint, HELLO, dead_after_s=0.3)
    agent.welcome(link)
    agent.answer(m.Pong(0, 1, "0", mapping=True))
    assert not link.wait_for(lambda: not link.online, 0.8)
    agent.answer(m.Pong(0, 1, "0"))
    assert link.wait_for(lambda: not link.online, WAIT_S)
    link.close()


def test_why_an_agent_cannot_be_used(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, until the agent can be used."""
    link = AgentLink(agent.endpoint, HELLO)
    (hello,) = agent.receive()
    refusal = m.Failure(hello.call_id, m.REFUSED, "it is full")
    why = f"the agent at {agent.endpoint} cannot be used: it is full"
    for _ in range(2):
        agent.answer(refusal)
    assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
    assert link.refusal == why
    assert not agent.router.poll(500)  # it asks again after seconds
    agent.answer(welcome(hello))
    assert link.wait_for(lambda: link.online, WAIT_S)
    assert caplog.messages.count(why) == 1
    assert link.refusal is None
    agent.answer(refusal)
    assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
    assert caplog.messages.count(why) == 2
    link.close()


def test_who_is_welcome_may_say_why_it_cannot_use_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for as long as it is so. Nor is HELLO said where others could have put the socket."""
    monkeypatch.setattr(link_module, "_REFUSED_TICK_S", 0.1)
    reasons: list[str | None] = [None, "a reason", "a reason"]
    directory = Path(agent.endpoint.removeprefix("ipc://")).parent
    directory.chmod(0o777)
    link = AgentLink(agent.endpoint, HELLO, on_welcome=lambda _: reasons.pop(), dead_after_s=WAIT_S)
    assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
    assert "others can write to" in (link.refusal or "")
    assert not agent.router.poll(300)
    directory.chmod(0o700)
    while reasons:
        left = len(reasons)
        (hello,) = agent.receive()  # or one that was repeated meanwhile: its WELCOME is ignored
        agent.answer(welcome(hello))
        link.wait_for(lambda left=left: len(reasons) < left, 0.5)
    assert link.wait_for(lambda: link.online, WAIT_S)
    assert link.refusal is None
    assert len([each for each in caplog.messages if each.endswith("used: a reason")]) == 1
    assert len([each for each in caplog.messages if "others can write to" in each]) == 1
    link.close()


def test_an_agent_that_is_not_there_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And that it is found. Of two links of an engine on a node, one speaks."""
    monkeypatch.setattr(news, "_ABSENT_S", 0.3)
    caplog.set_level(logging.INFO)
    endpoint = f"ipc://{tmp_path}/agent.sock"
    links = [AgentLink(endpoint, HELLO, dead_after_s=WAIT_S, speaks=each) for each in (True, False)]
    absent = f"no agent answers at {endpoint}: computing without the cache until one does"

    def said() -> list[str]:
        return [each for each in caplog.messages if endpoint in each]

    wait_until(lambda: absent in said(), what="a line")
    assert not links[0].wait_for(lambda: links[0].online, 1.0)
    assert said() == [absent]
    agent = Agent(tmp_path)
    for _ in links:
        (hello,) = agent.receive()
        agent.answer(welcome(hello))
    assert all(each.wait_for(lambda each=each: each.online, WAIT_S) for each in links)
    wait_until(lambda: len(said()) == 2, what="a line")
    for each in links:
        each.close()
    agent.close()
    assert said()[1].startswith(f"connected to the agent at {endpoint} ")
    assert {each.name for each in caplog.records} == {"vllm.lmcache_redis"}


def test_a_link_that_alone_is_refused_speaks(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    link = AgentLink(agent.endpoint, HELLO, speaks=False)
    (hello,) = agent.receive()
    agent.answer(m.Failure(hello.call_id, m.REFUSED, "it is full"))
    assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
    link.close()
    assert link.refusal in caplog.messages


def test_a_link_that_alone_has_no_agent_speaks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says nothing of what is right again by then."""
    monkeypatch.setattr(news, "_ABSENT_S", 0.1)
    monkeypatch.setattr(news, "_ALONE_S", 1.0)
    agent = Agent(tmp_path)
    link = AgentLink(agent.endpoint, HELLO, speaks=False)
    agent.welcome(link)
    agent.close()
    wait_until(lambda: any("lost the agent at" in line for line in caplog.messages), what="a line")
    link.close()
    assert len([line for line in caplog.messages if "lost the agent" in line]) == 1


def test_a_renamed_link_connects_again(agent: Agent, link: AgentLink) -> None:
    waiting = link.submit(m.EndSession, request_id="r")
    agent.receive()
    former = agent.peer
    link.rename("copy")
    assert waiting.wait(WAIT_S)
    assert waiting.lost
    assert agent.receive() == [m.Goodbye(0)]
    assert agent.peer == former
    assert agent.welcome(link).engine_id == "e/copy"
    assert agent.peer != former


def connect_again(agent: Agent, link: AgentLink) -> None:
    """As a link does that has lost its connection, and a question that is answered then."""
    former = agent.peer
    agent.welcome(link)
    assert agent.peer != former
    call = link.submit(m.EndSession, request_id="r")
    assert agent.receive() == [m.EndSession(call.call_id, "r")]
    agent.answer(m.Done(call.call_id))
    assert call.wait(WAIT_S)
    assert call.answer is not None


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.exc_info]


def test_a_socket_that_fails_costs_the_connection(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = link.submit(m.EndSession, request_id="a")
    breaking = link.submit(m.EndSession, lambda _: link._socket._socket.close(), request_id="b")
    for _ in range(2):
        agent.receive()
    agent.answer(m.Done(breaking.call_id))
    assert waiting.wait(WAIT_S)
    assert waiting.lost
    assert waiting.sent
    connect_again(agent, link)
    (record,) = errors_in(caplog)
    assert record.exc_info is not None
    assert record.exc_info[0] is zmq.ZMQError


def test_a_message_that_cannot_be_sent_is_lost(
    agent: Agent, link: AgentLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = link._socket.send

    def fail(frames: list[bytes]) -> bool:
        monkeypatch.setattr(link._socket, "send", send)
        raise zmq.ZMQError(zmq.EFAULT)

    monkeypatch.setattr(link._socket, "send", fail)
    call = link.submit(m.EndSession, request_id="a")
    assert call.wait(WAIT_S)
    assert call.lost
    assert call.sent, "as far as one can tell"
    connect_again(agent, link)


def test_a_link_that_cannot_open_a_socket_tries_again(
    agent: Agent, link: AgentLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is short of descriptors, say. That is said once."""
    monkeypatch.setattr(news, "_FIRST_PAUSE_S", 0.01)
    make, failures = transport._bounded_socket, iter(range(3))

    def fail(*args: Any) -> Any:
        if next(failures, None) is None:
            return make(*args)
        raise zmq.ZMQError(zmq.EMFILE)

    monkeypatch.setattr(transport, "_bounded_socket", fail)
    call = link.submit(m.EndSession, lambda _: link._socket._socket.close(), request_id="a")
    agent.receive()
    agent.answer(m.Done(call.call_id))
    connect_again(agent, link)
    assert next(failures, None) is None
    assert len(errors_in(caplog)) == 1


def test_a_welcome_that_fails_is_asked_for_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(news, "_FIRST_PAUSE_S", 0.01)
    failures = ["one", "two", "three"]

    def fail(_: m.Welcome) -> None:
        if failures:
            raise ValueError(f"bug {failures.pop()}")

    link = AgentLink(agent.endpoint, HELLO, on_welcome=fail, dead_after_s=WAIT_S)
    while failures:
        left = len(failures)
        (hello,) = agent.receive()
        agent.answer(welcome(hello))
        link.wait_for(lambda left=left: len(failures) < left, 0.2)
    connect_again(agent, link)
    assert len(errors_in(caplog)) == 1
    link.close()


def test_a_listener_that_fails_costs_nobody_else(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: AgentCall) -> None:
        raise ValueError("a bug")

    calls = link.submit_all([m.EndSession(0, name) for name in "abc"], fail)
    agent.receive()
    agent.answer(m.Done(calls[1].call_id))
    assert calls[1].wait(WAIT_S)
    agent.answer(m.Failure(0, m.UNKNOWN_PEER, "restarted"))
    assert all(call.wait(WAIT_S) for call in calls)
    assert [call.lost for call in calls] == [True, False, True]
    (hello,) = agent.receive()
    assert isinstance(hello, m.Hello)
    assert len(errors_in(caplog)) == 3


def test_a_closed_link_is_freed_without_the_collector(agent: Agent) -> None:
    class Client:
        def __init__(self) -> None:
            self.link = AgentLink(agent.endpoint, HELLO, on_welcome=self.welcomed)

        def welcomed(self, _: m.Welcome) -> None:
            pass

    def closed() -> list[weakref.ref[object]]:
        client = Client()
        agent.welcome(client.link)
        client.link.close()
        return [weakref.ref(client), weakref.ref(client.link)]

    gc.disable()
    try:
        assert [each() for each in closed()] == [None, None]
    finally:
        gc.enable()


def test_a_welcome_to_an_earlier_hello_is_ignored(agent: Agent) -> None:
    """It may come from an agent that has ended since."""
    link = AgentLink(agent.endpoint, HELLO)
    (first,) = agent.receive()
    (second,) = agent.receive()  # repeated, because the first had no answer
    assert second.call_id != first.call_id
    agent.answer(welcome(first, "stale"))
    (third,) = agent.receive()
    assert isinstance(third, m.Hello)
    assert link.welcome is None
    agent.answer(welcome(third))
    assert link.wait_for(lambda: link.online, WAIT_S)
    assert link.welcome is not None
    assert link.welcome.agent_id == "agent"
    link.close()


def test_who_is_welcome_is_not_greeted_again(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first HELLO may go, and be answered, before the link hears that it is connected."""
    wait = transport.AgentSocket.wait
    came: list[bool] = []

    def busy(self: transport.AgentSocket, timeout_s: float) -> tuple[bool, bool]:
        has_messages, has_events = wait(self, timeout_s)
        came.append(has_messages)
        return has_messages, has_events and any(came)

    monkeypatch.setattr(transport.AgentSocket, "wait", busy)
    welcomes: list[m.Welcome] = []
    link = AgentLink(
        agent.endpoint, HELLO, dead_after_s=WAIT_S, on_welcome=lambda w: welcomes.append(w)
    )
    (hello,) = agent.receive()
    agent.answer(welcome(hello))
    assert link.wait_for(lambda: link.online, WAIT_S)
    call = link.submit(m.EndSession, request_id="r")
    assert agent.receive() == [m.EndSession(call.call_id, "r")]
    agent.answer(welcome(hello))  # once more
    agent.answer(m.Done(call.call_id))
    assert call.wait(WAIT_S)
    assert call.answer == m.Done(call.call_id)
    assert link.welcome is welcomes[0], "what was registered with it is known by it"
    assert len(welcomes) == 1
    link.close()
    assert agent.receive() == [m.Goodbye(0)]


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_agent_that_does_not_know_the_link_is_greeted_again(
    agent: Agent, link: AgentLink, is_asked: bool
) -> None:
    """It may have forgotten an engine that was stopped, which asks nothing before it is known."""
    call = link.submit(m.EndSession, request_id="r")
    agent.receive()
    if is_asked:
        agent.answer(m.Failure(call.call_id, m.UNKNOWN_PEER, "who?"))
    else:
        agent.answer(m.Pong(0, 1, "0", known=False))
    assert call.wait(WAIT_S)
    assert call.lost != is_asked
    agent.welcome(link)
    assert link.online


def test_a_silent_agent_gets_nothing_that_was_meant_for_it(agent: Agent) -> None:
    """Another connection takes the place of the one whose messages it has not read."""
    link = AgentLink(agent.endpoint, HELLO, dead_after_s=0.3)
    agent.welcome(link)
    former = agent.peer
    call = link.submit(m.EndSession, request_id="r")
    assert call.wait(WAIT_S)
    assert (call.lost, call.sent) == (True, True)
    (question,) = agent.receive()
    while agent.peer == former:
        (question,) = agent.receive()
    assert isinstance(question, m.Hello)
    link.close()


def test_calls_of_a_link_that_is_offline_are_lost_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    link = AgentLink(f"ipc://{tmp_path}/none.sock", HELLO)
    calls = [link.submit(m.EndSession, request_id="r"), *link.lost(2)]
    link.close()
    calls.append(link.submit(m.EndSession, request_id="r"))
    assert [(call.lost, call.sent) for call in calls] == [(True, False)] * 4
    assert not link.online


def test_an_answer_that_cannot_be_decoded_refuses_the_agent(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = link.submit(m.EndSession, request_id="r")
    agent.receive()
    for _ in range(2):
        agent.router.send_multipart([agent.peer, m.PREAMBLE, b"\xff"])
    assert waiting.wait(WAIT_S)
    assert waiting.lost
    assert link.refusal is not None
    link.close()
    assert len([each for each in caplog.messages if "cannot be used" in each]) == 1


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
    assert (one.done, other.lost) == (False, False)
    calls.answered(m.Done(other.call_id, 7))  # once
    assert other.answer == m.Done(other.call_id)


def test_queued_and_sent_calls_are_lost_together() -> None:
    calls, ended = AgentCalls(), list[AgentCall]()
    (sent,), (queued,) = calls.new(1, ended.append), calls.new(1, ended.append)
    calls.sent([sent])
    calls.put([m.EndSession(0, "b")], [queued])
    calls.lose_all()
    assert ended == [sent, queued]
    assert all(call.lost for call in ended)
    assert (sent.sent, queued.sent) == (True, False)
    calls.lose_all()
    lose(ended)
    assert len(ended) == 2  # each ends once
    assert [*calls.take_queued()] == []
