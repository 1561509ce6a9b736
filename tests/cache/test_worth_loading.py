# SPDX-License-Identifier: Apache-2.0
"""Lookups over simulated links and engines, on a clock of their own, against computing alone.

Prompts of 2,048 tokens, 16 MiB of KV in eight chunks, that an engine computes in 0.25 s, if nothing
else is said.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from tests.cache.simulated import CHUNK_TOKENS, Clock, Link, SimulatedEngine

CHUNKS = 8
TOKENS = CHUNKS * CHUNK_TOKENS
COMPUTE_S = 0.25
CHUNK_BYTES = 2 << 20
PAUSE_S = 0.05
Make = Callable[..., SimulatedEngine]


@pytest.fixture
def make() -> Make:
    clock = Clock()

    def make(
        mbit_per_s: float | None,
        latency_s: float = 0.0002,
        burst_s: float = 0.0,
        compute_s: float = COMPUTE_S,
        chunk_bytes: int = CHUNK_BYTES,
        first_takes: float = 1.0,
    ) -> SimulatedEngine:
        """An engine that has measured itself, and a new agent; None: no agent.

        first_takes: the time of its first prompt, as a multiple of that of the others.
        """
        engine = SimulatedEngine(clock, None, first_takes * compute_s / TOKENS)
        one_after_the_other(engine, 1)
        engine.token_s = compute_s / TOKENS
        one_after_the_other(engine, 3)
        if mbit_per_s is not None:
            bytes_per_s = mbit_per_s * 1e6 / 8
            burst_bytes = burst_s * bytes_per_s
            engine.link = Link(clock, bytes_per_s, latency_s, burst_bytes, chunk_bytes)
        engine.new_agent()
        return engine

    return make


def one_after_the_other(
    engine: SimulatedEngine, count: int, pause_s: float = PAUSE_S, more_tokens: int = 0
) -> list[float]:
    """The time of each to its first token, as a share of that of computing."""
    shares = []
    for _ in range(count):
        request = engine.ask(TOKENS, more_tokens)
        engine.wait(request)
        shares.append(request.took_s / engine.seconds(TOKENS))
        engine.pause(pause_s)
    return shares


def in_a_crowd(engine: SimulatedEngine, count: int, every_s: float) -> float:
    """The sum of their times."""
    for _ in range(count):
        engine.ask(TOKENS)
        engine.pause(every_s)
    engine.wait()
    engine.pause(PAUSE_S)
    return sum(request.took_s for request in engine.requests[-count:])


def loaded(engine: SimulatedEngine, count: int) -> list[int | None]:
    """The chunks that each of the last requests has loaded."""
    return [request.loaded for request in engine.requests[-count:]]


@pytest.mark.parametrize("compute_s", [0.1, 0.15, 0.3, 1.0])
@pytest.mark.parametrize("mbit_per_s", [20, 100, 300])
def test_the_first_requests_of_an_agent_lose_nothing(
    make: Make, mbit_per_s: float, compute_s: float
) -> None:
    """Back to back and with pauses, whatever the first prompt of the engine took."""
    settings = product((1.0, 3.0), (0.0, 0.01), (0.0, 0.05, 1.0, 12.0), ((0, 2), (20, 1)))
    for first_takes, burst_s, pause_s, (more_tokens, mib) in settings:
        engine = make(
            mbit_per_s, burst_s=burst_s, compute_s=compute_s,
            chunk_bytes=mib << 20, first_takes=first_takes,
        )  # fmt: skip
        shares = one_after_the_other(engine, 6, pause_s, more_tokens)
        assert max(shares) < 1.1
        # All is loaded or nothing: the engine is idle.
        assert {*loaded(engine, 6)} <= {0, CHUNKS}
        if CHUNKS * mib * 2**23 / mbit_per_s / 1e6 > 1.1 * compute_s:
            assert loaded(engine, 6) == [0] * 6


@pytest.mark.parametrize("more_tokens", [0, 100])
def test_an_engine_that_has_ended_is_not_believed_busy(make: Make, more_tokens: int) -> None:
    """It has become faster than it has measured. The next request comes at the first token."""
    engine = make(100, compute_s=0.15, chunk_bytes=1 << 20)
    engine.token_s /= 1.6
    for _ in range(4):
        request = engine.ask(TOKENS, more_tokens)
        engine.clock.run(engine.world, lambda each=request: bool(each.first_token_s))  # type: ignore[misc]
    assert loaded(engine, 4) == [0] * 4


@pytest.mark.parametrize("seed", range(40))
def test_at_random_none_takes_longer_than_computing(make: Make, seed: int) -> None:
    """Any rates and times; steps of the engine take up to a twentieth more or less."""
    rng = random.Random(seed)
    mbit_per_s, compute_s = 10 ** rng.uniform(1, 4), 10 ** rng.uniform(-1, 0.5)
    engine = make(
        mbit_per_s,
        latency_s=rng.choice([0.0002, 0.001]),
        burst_s=rng.choice([0.0, 0.01]),
        compute_s=compute_s,
        chunk_bytes=rng.choice([1, 2, 4]) << 20,
        first_takes=rng.choice([1.0, 1.5, 3.0]),
    )
    engine.noise = lambda: rng.uniform(0.95, 1.05)
    pause_s, more_tokens = rng.choice([0.0, 0.05, 1.0, 12.0]), rng.choice([0, 20])
    assert max(one_after_the_other(engine, 6, pause_s, more_tokens)) < 1.1 * 1.05


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
@pytest.mark.parametrize("compute_s", [0.1, 0.3, 1.0])
def test_what_is_much_faster_to_load_is_loaded(
    make: Make, compute_s: float, pause_s: float
) -> None:
    engine = make(10_000, compute_s=compute_s, burst_s=0.01)
    one_after_the_other(engine, 6, pause_s)
    assert loaded(engine, 6) == [CHUNKS] * 6


@pytest.mark.parametrize("latency_s", [0.0002, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("mbit_per_s", [20, 100, 300])
def test_no_request_loses_behind_a_slow_link(
    make: Make, mbit_per_s: float, latency_s: float
) -> None:
    """Also not when the link is measured again."""
    for burst_s in (0.0, 0.01):
        engine = make(mbit_per_s, latency_s, burst_s)
        shares = one_after_the_other(engine, 5)
        assert max(shares) < 1.1
        later = one_after_the_other(engine, 60)
        assert max(later) < 1.05
        assert engine.link is not None
        assert 2 <= engine.link.loaded <= 4, "one chunk in ten seconds"
        assert not any(loaded(engine, 65)), "all or nothing"


@pytest.mark.parametrize("latency_s", [0.0002, 0.005])
def test_a_fast_link_loses_nothing(make: Make, latency_s: float) -> None:
    engine = make(10_000, latency_s)
    first, *others = one_after_the_other(engine, 20)
    assert loaded(engine, 20) == [CHUNKS] * 20
    assert first < max(others) + 0.03, "the first chunk is loaded alone"
    assert max(others) < 0.15


@pytest.mark.parametrize(
    ("mbit_per_s", "latency_s", "share"),
    [(1000, 0.0002, 0.56), (1000, 0.02, 0.75), (10_000, 0.02, 0.25)],
)
def test_the_first_request_of_a_link_in_between_buys_its_rate(
    make: Make, mbit_per_s: float, latency_s: float, share: float
) -> None:
    first, *others = one_after_the_other(make(mbit_per_s, latency_s), 20)
    assert first < 1.1
    assert max(others) < share


@pytest.mark.parametrize("every_s", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("mbit_per_s", [20, 100, 300, 1000, 10_000])
def test_a_crowd_is_served_no_later(make: Make, mbit_per_s: float, every_s: float) -> None:
    engine, plain = make(mbit_per_s), make(None)
    for _ in range(3):
        assert in_a_crowd(engine, 10, every_s) < 1.05 * in_a_crowd(plain, 10, every_s)


def test_what_fits_beside_the_prompts_of_others_is_loaded(make: Make) -> None:
    """The engine is busy for longer than a few chunks take."""
    engine, plain = make(300), make(None)
    one_after_the_other(engine, 2)
    assert in_a_crowd(engine, 10, 0.1) < 0.8 * in_a_crowd(plain, 10, 0.1)
    assert any(0 < (chunks or 0) < CHUNKS for chunks in loaded(engine, 10))


def test_what_a_network_has_saved_up_costs_one_request_little(make: Make) -> None:
    """The first chunk takes 0.03 s and each other one 0.08. The second one tells."""
    engine = make(200, burst_s=0.05, compute_s=0.4)
    shares = one_after_the_other(engine, 6)
    assert max(shares) < 1.1
    assert loaded(engine, 6) == [0, 2, 0, 0, 0, 0]


def test_a_link_that_becomes_slow_costs_one_request(make: Make) -> None:
    engine = make(10_000)
    one_after_the_other(engine, 5)
    assert engine.link is not None
    engine.link.bytes_per_s /= 500
    first, *others = one_after_the_other(engine, 5)
    assert first < 2.2, "it waits for no longer than computing takes"
    assert max(others) < 1.05


def test_a_link_that_becomes_fast_is_found(make: Make) -> None:
    engine = make(20)
    one_after_the_other(engine, 5)
    assert engine.link is not None
    engine.link.bytes_per_s *= 500
    engine.pause(10.0)
    first, *others = one_after_the_other(engine, 5)
    assert first < 1.05
    assert max(others) < 0.15


def test_a_server_that_stops_costs_one_computing_time(make: Make) -> None:
    engine = make(10_000)
    one_after_the_other(engine, 2)
    assert engine.link is not None
    engine.link.latency_s = 1e9
    first, *others = one_after_the_other(engine, 5)
    assert first < 2.1
    assert max(others) < 1.1
