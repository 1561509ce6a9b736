# SPDX-License-Identifier: Apache-2.0
"""A scheduler's lookups: each answer that an agent may give, none, and those that it may not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_redis import messages as m
from lmcache_redis.client import scheduler as scheduler_module
from lmcache_redis.client.scheduler import SchedulerClient
from tests.client.stand_in import WAIT_S, Agent

HASHES = (b"a" * 32, b"b" * 32, b"c" * 32)
CHUNK_TOKENS = 64


@pytest.fixture
def client(agent: Agent) -> Iterator[SchedulerClient]:
    made = SchedulerClient(
        agent.endpoint, "model", 1, 16, engine_id="engine", agent_dead_after_s=WAIT_S
    )
    agent.welcome(made.link)
    yield made
    made.shutdown()


def ask(agent: Agent, client: SchedulerClient, name: str, first_chunk: int = 0) -> m.Lookup:
    client.begin_lookup(name, HASHES, first_chunk=first_chunk, token_s=0.5, busy_s=1.5)
    question = agent.question()
    assert isinstance(question, m.Lookup)
    assert (question.request_id, question.hashes) == (name, HASHES)
    assert (question.token_s, question.busy_s) == (0.5, 1.5)
    return question


def answered(client: SchedulerClient, name: str) -> int | None:
    return client.hit_tokens(name, wait_s=WAIT_S)


def test_a_hit_is_a_prefix_that_is_pinned(agent: Agent, client: SchedulerClient) -> None:
    """It counts the chunks before its first one. What may only be compared is no hit."""
    assert (client.chunk_size_tokens(), client.num_blocks_per_chunk()) == (CHUNK_TOKENS, 4)
    question = ask(agent, client, "r", first_chunk=2)
    client.begin_lookup("r", HASHES[:1])  # it has one
    assert client.hit_tokens("r") is None
    assert (client.pinned_tokens("r"), client.hit_tiers("r")) == (0, [])
    agent.answer(m.LookupResult(question.call_id, 2, "hr"))
    assert answered(client, "r") == client.pinned_tokens("r") == 4 * CHUNK_TOKENS
    assert client.hit_tiers("r") == ["host", "redis"]
    client.release_lookup("r")
    (released,) = agent.receive()
    assert isinstance(released, m.ReleaseLocks)
    assert (released.request_id, released.hashes) == ("r", HASHES)
    client.forget_lookup("r")
    assert (client.hit_tokens("r"), client.pinned_tokens("r"), client.hit_tiers("r")) == (0, 0, [])

    question = ask(agent, client, "s")
    assert question.begun == ("r",)
    agent.answer(m.LookupResult(question.call_id, 3, "hhh", compare_only=True))
    assert answered(client, "s") == 0
    assert client.pinned_tokens("s") == 3 * CHUNK_TOKENS
    client.end_session("s")
    assert [type(each) for each in agent.receive()] == [m.EndSession]
    assert client.pinned_tokens("s") == 0


def test_how_an_agent_wants_to_be_asked(tmp_path: Path) -> None:
    """Nothing is known before. Chunks before the first are named to an agent that counts them."""
    agent = Agent(tmp_path)
    client = SchedulerClient(
        agent.endpoint, "model", 1, 16, engine_id="engine", agent_dead_after_s=WAIT_S
    )
    for every, store_after in ((0, 1), (7, 2)):
        known = client.chunk_size_tokens(), client.canary_every, client.names_before
        assert known == ((64, 0, False) if store_after == 2 else (0, 0, False))
        (hello,) = agent.receive()
        welcome = m.Welcome(hello.call_id, "agent", 1, 2, 64, 60.0, "0", every, store_after)
        agent.answer(welcome)
        assert client.link.wait_for(lambda: client.link.online, WAIT_S)
        assert (client.canary_every, client.names_before) == (every, store_after == 2)
        client.begin_lookup(f"r{every}", HASHES[2:], first_chunk=2, before=HASHES[:2])
        (question,) = agent.receive()
        assert isinstance(question, m.Lookup)
        assert question.before == (HASHES[:2] if store_after == 2 else ())
        agent.answer(m.Failure(0, m.UNKNOWN_PEER, "restarted"))
        assert client.link.wait_for(lambda: not client.link.online, WAIT_S)
    client.shutdown()
    agent.close()


def test_answers_that_come_in_another_order_are_each_their_own(
    agent: Agent, client: SchedulerClient
) -> None:
    questions = [ask(agent, client, name) for name in "abc"]
    for hits, question in reversed([*enumerate(questions)]):
        agent.answer(m.LookupResult(question.call_id, hits, "d" * hits))
    agent.answer(m.LookupResult(questions[0].call_id, 3, "ddd"))  # its call has ended
    assert [answered(client, name) for name in "abc"] == [0, 64, 128]
    assert client.link.online


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: m.LookupResult(n, 4, "hhhh"),  # vLLM would be promised more than its prompt has
        lambda n: m.LookupResult(n, -1),
        lambda n: m.Done(n, 3),
        lambda n: m.RetrieveResult(n, ()),
    ],
)
def test_an_answer_that_cannot_be_is_a_miss(
    agent: Agent,
    client: SchedulerClient,
    wrong: Callable[[int], m.Answer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the agent may have pinned for it is given back, and the next lookup is as any other."""
    question = ask(agent, client, "r", first_chunk=1)
    agent.answer(wrong(question.call_id))
    assert answered(client, "r") == client.pinned_tokens("r") == 0
    assert client.hit_tiers("r") == []
    (ended,) = agent.receive()
    assert isinstance(ended, m.EndSession)
    assert ended.request_id == "r"
    (line,) = [each for each in caplog.messages if "request r" in each]
    assert "cannot be" in line
    assert answered(client, "r") == 0
    assert caplog.messages.count(line) == 1
    question = ask(agent, client, "s")
    agent.answer(m.LookupResult(question.call_id, 3, "rrr"))
    assert answered(client, "s") == 3 * CHUNK_TOKENS


def test_a_lookup_that_fails_is_a_miss_and_says_why(
    agent: Agent, client: SchedulerClient, caplog: pytest.LogCaptureFixture
) -> None:
    question = ask(agent, client, "r")
    agent.answer(m.Failure(question.call_id, m.FAILED, "no memory"))
    assert answered(client, "r") == 0
    assert answered(client, "r") == 0
    assert caplog.messages.count("the lookup of request r failed: no memory") == 1
    assert client.link.online, "it may answer the next one"


def test_who_gets_no_answer_computes_and_the_late_one_is_ignored(
    agent: Agent,
    client: SchedulerClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent is told, for it would pin chunks that nobody loads."""
    caplog.set_level(logging.WARNING)
    question = ask(agent, client, "r")
    assert client.hit_tokens("r") is None
    now_s = time.monotonic()
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now_s + 60.2))
    assert client.hit_tokens("r") is None, "the agent's own deadline and a moment"
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now_s + 60.3))
    assert client.hit_tokens("r") == 0
    monkeypatch.undo()
    (ended,) = agent.receive()
    assert isinstance(ended, m.EndSession)
    agent.answer(m.LookupResult(question.call_id, 3, "hhh"))
    assert client.link.submit(m.GetChunkSize).call_id  # goes behind it
    assert [type(each) for each in agent.receive()] == [m.GetChunkSize]
    assert (client.hit_tokens("r"), client.pinned_tokens("r")) == (0, 0)
    assert len(caplog.messages) == 1


def test_lookups_of_a_lost_agent_are_misses(agent: Agent, client: SchedulerClient) -> None:
    """Also those that begin while there is none. Epochs are cleared at the next one."""
    ask(agent, client, "r")
    agent.answer(m.Failure(0, m.UNKNOWN_PEER, "who?"))
    assert answered(client, "r") == 0
    assert not client.link.online
    client.begin_lookup("s", HASHES)
    assert client.hit_tokens("s") == 0
    client.clear(b"epoch 01")
    client.clear(None)  # nothing is owed: it was of what this engine has now
    agent.welcome(client.link, "another")
    client.clear(b"epoch 02")
    cleared = [agent.receive()[0] for _ in range(2)]
    assert [each.epoch for each in cleared if isinstance(each, m.Clear)] == [
        b"epoch 01",
        b"epoch 02",
    ]
    agent.answer(m.Done(cleared[0].call_id, 1))
    agent.answer(m.Failure(cleared[1].call_id, m.FAILED, "?"))
    client.clear(b"epoch 03")
    (third,) = agent.receive()
    assert isinstance(third, m.Clear)
    assert third.epoch == b"epoch 03", "nothing is asked twice"


def test_requests_that_began_are_named_with_the_next_question(
    agent: Agent, client: SchedulerClient
) -> None:
    """A lookup of no chunks asks nothing. That a request has ended is a message of its own."""
    assert ask(agent, client, "first").begun == ()
    assert ask(agent, client, "second").begun == ()
    client.forget_lookup("first")
    client.forget_lookup("without a lookup")
    client.begin_lookup("empty", ())
    assert client.hit_tokens("empty") == 0
    assert ask(agent, client, "third").begun == ("first",)
    client.forget_lookup("third")
    client.forget_lookup("second")
    client.end_session("third")
    assert isinstance(agent.question(), m.EndSession)
    assert ask(agent, client, "fourth").begun == ("second",)
    assert ask(agent, client, "fifth").begun == ()
