# SPDX-License-Identifier: Apache-2.0
"""What loads have saved: the arithmetic, and what a real agent counts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lmcache_redis.agent.sessions import HitLoad
from lmcache_redis.chunks.names import FULL_REACH, Reach
from tests.agent.played import CHUNK_BYTES, HASHES, Device, Played
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until

WINDOW = Reach("window", 64)


def load(*workers: int, first_chunk: int = 0, token_s: float = 0.01) -> HitLoad:
    return HitLoad({*workers}, first_chunk, 256, token_s, waited_s=0.5)


def test_a_load_saves_its_tokens_less_the_wait() -> None:
    hit = load(0)
    hit.begun(10.0)
    assert hit.ended(0, 1024, 12.0) == (1024, pytest.approx(1024 * 0.01 - 0.5 - 2.0))


def test_a_loss_is_told() -> None:
    hit = load(0, token_s=0.001)
    hit.begun(10.0)
    assert hit.ended(0, 1024, 12.0) == (1024, pytest.approx(1.024 - 2.5))


def test_seconds_that_nobody_has_measured_are_not_known() -> None:
    hit = load(0, token_s=0.0)
    hit.begun(10.0)
    assert hit.ended(0, 1024, 12.0) == (1024, None)


def test_the_last_retrieve_of_all_workers_counts_once() -> None:
    hit = load(0, 1)
    for now_s in (1.0, 1.1, 1.2):  # two groups of worker 0, one of worker 1
        hit.begun(now_s)
    assert hit.ended(0, 512, 2.0) is None
    assert hit.ended(1, 512, 3.0) is None
    assert hit.ended(0, 512, 4.0) == (512, pytest.approx(5.12 - 0.5 - 3.0))


def test_a_worker_that_has_not_begun_is_waited_for() -> None:
    hit = load(0, 1)
    hit.begun(1.0)
    assert hit.ended(0, 512, 2.0) is None
    hit.begun(2.5)
    assert hit.ended(1, 512, 3.0) is not None


@pytest.mark.parametrize("order", [(None, 512), (512, None)])
def test_a_failure_of_any_retrieve_saves_nothing(order: tuple[int | None, ...]) -> None:
    hit = load(0)
    for _ in order:
        hit.begun(1.0)
    assert [hit.ended(0, tokens, 2.0) for tokens in order] == [None, None]


def test_tokens_that_the_engine_has_are_not_counted() -> None:
    # 80 tokens of the first loaded chunk are the engine's own.
    assert load(0, first_chunk=2).tokens_of(FULL_REACH, [2, 3, 4], 80) == 3 * 256 - 80
    assert load(0, first_chunk=2).tokens_of(FULL_REACH, [3, 4], 0) == 2 * 256


def test_a_window_stands_for_what_is_before_it() -> None:
    hit = load(0, first_chunk=1)
    assert hit.tokens_of(WINDOW, [9], 128) == 9 * 256
    # Full attention beside it knows better.
    hit.begun(1.0)
    hit.begun(1.0)
    assert hit.ended(0, hit.tokens_of(WINDOW, [9], 128), 1.0) is None
    saving = hit.ended(0, hit.tokens_of(FULL_REACH, range(1, 10), 100), 1.0)
    assert saving is not None
    assert saving[0] == 9 * 256 - 100


@pytest.mark.parametrize(("held", "tokens"), [(HASHES, 5 * CHUNK_BYTES), (HASHES[:4], 0)])
def test_a_retrieve_counts_if_it_is_whole(held: list[bytes], tokens: int) -> None:
    played = Played(Device())
    played.hold(*held)
    played.session.positions = {each: n for n, each in enumerate(HASHES)}
    played.session.load = HitLoad({0}, 0, CHUNK_BYTES, token_s=1.0, waited_s=0.0)
    played.retrieve().start()
    played.run(lambda: played.answers)
    assert played.metrics.snapshot()["saved_tokens"] == tokens
    played.close()


def test_a_request_that_was_aborted_saves_nothing() -> None:
    go_on = threading.Event()
    played = Played(Device(during=lambda: go_on.wait(10)))  # type: ignore[arg-type]
    played.hold(*HASHES)
    played.session.positions = {each: n for n, each in enumerate(HASHES)}
    played.session.load = HitLoad({0}, 0, CHUNK_BYTES, token_s=1.0, waited_s=0.0)
    played.retrieve().start()
    played.sessions.end(played.session)
    go_on.set()
    played.run(lambda: played.answers)
    assert played.metrics.snapshot()["saved_tokens"] == 0
    played.close()


PROMPT = block_hashes("a prompt", 16)  # four chunks of 64 tokens
TOKEN_S = 0.5  # so slow that no wait takes it away


def worth(agent: AgentServer) -> dict[str, Any]:
    status = agent.status()
    names = ("hit_rate", "tokens_saved", "tokens_saved_untimed", "prefill_s_saved")
    return {name: status[name] for name in names}


@pytest.mark.servers
def test_an_agent_counts_what_the_engine_takes(start: Starts) -> None:
    agent = start.agent()
    nothing = {"host": None, "disk": None, "redis": None}
    expected: dict[str, Any] = {"tokens_saved_untimed": 0, "prefill_s_saved": 0.0}
    assert worth(agent) == {"hit_rate": nothing, "tokens_saved": 0, **expected}
    with Engine(agent.endpoint, world_size=2) as engine:
        engine.store("first", PROMPT, range(16))
        # A hit that the engine does not load.
        assert engine.lookup("refused", PROMPT, token_s=TOKEN_S) == 256
        engine.scheduler.end_session("refused")
        assert worth(agent)["tokens_saved"] == 0
        assert worth(agent)["hit_rate"] == {"host": 1.0, "disk": 0.0, "redis": 0.0}
        # One that it loads, but for the first block, which it has.
        began_s = time.monotonic()
        assert engine.lookup("taken", PROMPT, token_s=TOKEN_S) == 256
        assert not engine.retrieve("taken", PROMPT, range(16), 16)
        wait_s = time.monotonic() - began_s
        saved = worth(agent)
        assert saved["tokens_saved"] == 240
        assert 240 * TOKEN_S - wait_s <= saved["prefill_s_saved"] < 240 * TOKEN_S
        counters = agent.counters()
        assert counters["saved_tokens"] == 240
        assert counters["saved_prefill_seconds"] == pytest.approx(
            saved["prefill_s_saved"], abs=1e-3
        )
        # Its rank 1 loads nothing: the engine computes.
        assert engine.lookup("half", PROMPT, token_s=TOKEN_S) == 256
        half = engine.workers[0].begin_retrieves(
            ["half"], [engine.op(PROMPT, range(16))], engine.workers[0].signal()
        )
        wait_until(lambda: half[0].over, what="a retrieve")
        assert worth(agent) == {**saved, "hit_rate": worth(agent)["hit_rate"]}
        # A measured rate that is lost again: only tokens are counted.
        assert engine.lookup("unknown", PROMPT) == 256
        assert not engine.retrieve("unknown", PROMPT, range(16))
        after = worth(agent)
        assert (after["tokens_saved"], after["tokens_saved_untimed"]) == (496, 256)
        assert after["prefill_s_saved"] == saved["prefill_s_saved"]
        model = agent.status()["models"]["test/model"]
        assert (model["saved_tokens"], model["saved_untimed_tokens"]) == (496, 256)


@pytest.mark.servers
def test_seconds_are_unknown_until_an_engine_has_measured(start: Starts) -> None:
    agent, engine = start()
    engine.store("first", PROMPT, range(16))
    assert engine.lookup("second", PROMPT) == 256
    assert not engine.retrieve("second", PROMPT, range(16))
    saved = worth(agent)
    assert saved["tokens_saved"] == saved["tokens_saved_untimed"] == 256
    assert saved["prefill_s_saved"] is None
