# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on the CPU, with and without the cache: the same tokens, whatever happens.

Engines take half a minute to start, so each test is one engine (or two) and many questions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.chunks.names import parse_stripe_key
from tests.asynchronous import OVERLAPPED, SAID
from tests.engines import ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import OPTIONS, Prompts
from tests.integrations.router import Router
from tests.scraping import samples_in
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

CHUNK = 256
# Far above every deadline that a request may have to wait for, also on a busy machine.
NO_HANG_S = 10.0


def ready(agent: AgentServer) -> bool:
    """Whether an engine can hit at this agent: its scheduler may come later than its worker."""
    engines = agent.status()["engines"]
    return bool(engines) and all(engine["ready"] for engine in engines)


def start(
    model_dir: Path,
    agent: AgentServer | None,
    log: Path,
    *,
    env: dict[str, str] | None = None,
    kv_transfer: Mapping[str, Any] | None = None,
    **options: object,
) -> ForkedEngine:
    """An engine, known to the agent where one runs. kv_transfer: in place of the connector's."""
    if kv_transfer is None and agent is not None:
        kv_transfer = transfer_config(agent.endpoint)
    engine = ForkedEngine(
        model_dir,
        kv_transfer=kv_transfer,
        log_path=log,
        options={**OPTIONS, **options},
        env=env,
    )
    if agent is not None and agent.running:
        try:
            wait_until(lambda: ready(agent), what="the engine at the agent")
        except AssertionError:
            engine.close()
            raise
    return engine


def wait_for_a_hit(engine: ForkedEngine, question: list[int]) -> None:
    """Asks a new question until it hits: all processes of the engine know the new agent."""

    def hits() -> bool:
        empty(engine)
        return engine.generate([question], 1).details["cached_tokens"] == [CHUNK]

    wait_until(hits, what="a hit at the new agent")
    empty(engine)


def check_metrics(engine: ForkedEngine, agent: AgentServer) -> None:
    """What vLLM's own page says of the loads."""
    samples = samples_in(engine.metrics())
    model = next(labels[1] for name, labels in samples if name == "vllm:prompt_tokens_total")

    def of(name: str, *labels: str) -> float:
        return samples[f"lmcache_redis_vllm_{name}", ("0", model, *labels)]

    hits = {tier: of("hit_tokens_total", tier) for tier in ("host", "disk", "redis")}
    # Each chunk is loaded into one engine, mostly once.
    assert hits["redis"] >= CHUNK * agent.counter("hit_chunks_redis") - CHUNK
    assert hits["host"] >= 4 * CHUNK
    assert hits["disk"] == 0
    assert sum(hits.values()) <= CHUNK * of("loaded_chunks_total", "0")
    # The agent counts the tokens that vLLM has taken, and no others.
    assert agent.status()["tokens_saved"] == sum(hits.values())
    assert of("failed_chunks_total", "0") == 0
    assert of("registered", "0") == 1
    assert of("load_seconds_count", "0") >= 5
    assert of("lookup_seconds_count") >= of("load_seconds_count", "0")
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    if (by_source, ("0", model, "host")) in samples:  # vLLM 0.32 or newer
        assert samples[by_source, ("0", model, "host")] == hits["host"]
        assert samples[by_source, ("0", model, "external_unspecified")] == hits["redis"]


def check_events(engine: ForkedEngine, router: Router, prompt: list[int], tokens: int) -> None:
    """What a router is told of the blocks of a prompt that is in all places."""
    places = (("GPU", None), ("CPU", "LOCAL"), ("STORAGE", "REMOTE"))

    def is_told() -> bool:
        router.told(lambda: engine.generate([[1] * 20], 1))
        blocks = router.of_prompt(prompt, tokens)
        assert len(blocks) == len({*blocks}) > 0
        return all({*blocks} <= {*router.there[place]} for place in places)

    wait_until(is_told, "the places of the prompt")
    for place, there in router.there.items():
        if place != ("GPU", None):
            # What the connector says of a block is what vLLM itself says of it.
            for block_hash, block in there.items():
                assert block == router.stored_by_vllm[block_hash]
    assert [*router.sequence] == [*range(len(router.sequence))]


def test_a_new_engine_answers_from_redis_what_another_computed(
    plain: ForkedEngine, model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    one = prompts.tokens(4 * CHUNK + 1)  # fully cached except for one token
    exact = prompts.tokens(2 * CHUNK)  # fully cached: the last token is computed again
    inside = prompts.tokens(2 * CHUNK + 100)  # ends inside a chunk
    short = prompts.tokens(100)  # less than a chunk
    shared = prompts.tokens(CHUNK)
    batch = [shared + prompts.tokens(CHUNK + n) for n in range(8)]
    batch += [prompts.tokens(CHUNK + 50 + n) for n in range(8)]
    questions = [[one], [exact], [inside], [short], batch]

    expected = [plain.generate(question, 12).outputs for question in questions]
    # One more than completes a chunk: the last step is scheduled before its token is known.
    decoded = plain.generate([one], 2 * CHUNK + 1).outputs[0]
    second_turn = one + decoded + prompts.tokens(20)
    expected_second = plain.generate([second_turn], 12).outputs
    assert len({tuple(tokens) for answers in expected for tokens in answers}) == 20

    with start(model_dir, agent, tmp_path / "cold.log") as engine:
        assert [engine.generate(question, 12).outputs for question in questions] == expected
        # Chunks completed while decoding are stored too: the second turn of another engine hits.
        assert engine.generate([one], 2 * CHUNK + 1).outputs[0] == decoded
        agent.wait_idle()
    # As on a GPU. In the engine that has given the expected answers they do not overlap.
    log = (tmp_path / "cold.log").read_text()
    assert f"{SAID}2" in log
    assert OVERLAPPED in log

    assert agent.terminate() == 0
    agent.start()  # an empty host pool: everything comes from Redis
    router = Router(tmp_path)
    with router, start(model_dir, agent, tmp_path / "warm.log", **router.options) as engine:
        hits = []
        for question, answer in zip(questions, expected, strict=True):
            warm = engine.generate(question, 12)
            assert warm.outputs == answer
            hits.append(warm.details["cached_tokens"])
        assert hits[:4] == [[4 * CHUNK], [2 * CHUNK], [2 * CHUNK], [0]]
        assert all(cached >= CHUNK for cached in hits[4])
        warm = engine.generate([second_turn], 12)
        assert warm.outputs == expected_second
        # 1,025 tokens of prompt and 512 of the answer whose KV was computed: 6 chunks.
        assert warm.details["cached_tokens"] == [6 * CHUNK]
        assert agent.counter("hit_chunks_redis") > 0

        # The host pool now holds them: vLLM's own cache is emptied, ours is not.
        assert engine.reset_prefix_cache()
        loaded = agent.counter("loaded_chunks")
        of_a_team = {"kv_transfer_params": {"lmcache_redis": {"tenant": "team"}}}
        assert engine.generate([one], 12, extra_args=of_a_team).outputs == expected[0]
        assert agent.counter("loaded_chunks") == loaded
        team = agent.status()["tenants"]["team"]
        assert team["hit_tokens"] == team["saved_tokens"] == 4 * CHUNK

        check_metrics(engine, agent)
        check_events(engine, router, one, 4 * CHUNK)

        # And emptied with it, there are no hits.
        assert engine.reset_prefix_cache(connector=True)
        again = engine.generate([one], 12)
        assert again.outputs == expected[0]
        assert again.details["cached_tokens"] == [0]
        # So a router must not expect the old chunks. What was computed again is stored anew.
        told = router.told(lambda: engine.generate([prompts.tokens(20)], 1))
        assert {*told.there["CPU", "LOCAL"]} == {*told.of_prompt(one, 4 * CHUNK)}
        # Without its agent an engine can load nothing.
        agent.kill()

        def removed() -> bool:
            told = router.told(lambda: engine.generate([prompts.tokens(20)], 1))
            return not told.there["CPU", "LOCAL"]

        wait_until(removed, what="removed blocks")
        assert not router.there["STORAGE", "REMOTE"]


def test_whatever_fails_the_answers_stay_right(
    plain: ForkedEngine,
    model_dir: Path,
    agent: AgentServer,
    redis_server: RedisServer,
    tmp_path: Path,
    prompts: Prompts,
) -> None:
    questions = [prompts.tokens(3 * CHUNK + 10) for _ in range(8)]
    expected = [plain.generate([q], 4).outputs[0] for q in questions]

    def ask(engine: ForkedEngine, number: int) -> tuple[float, int]:
        answer = engine.generate([questions[number]], 4)
        assert answer.outputs[0] == expected[number]
        return answer.seconds, answer.details["cached_tokens"][0]

    agent.terminate()  # the engine starts without an agent
    log = tmp_path / "engine.log"
    with start(model_dir, agent, log) as engine:
        for number in range(8):
            assert ask(engine, number)[1] == 0
        empty(engine)
        absent = f"no agent answers at {agent.endpoint}: computing without the cache until one does"
        wait_until(lambda: absent in log.read_text(), what="a line that no agent is there")
        agent.start()  # and picks it up when it comes
        wait_until(lambda: ready(agent), what="the engine at the agent")
        found = f"connected to the agent at {agent.endpoint}"
        for level, line in (("WARNING", absent), ("INFO", found)):
            (said,) = [each for each in log.read_text().splitlines() if line in each]
            vllms = rf"\(\S+ pid=\d+\) {level} [-\d]+ [:\d]+ \[\S+.py:\d+\] "
            assert re.match(vllms, said), "not in the format of vLLM's log"
        for number in range(8):
            assert ask(engine, number)[1] == 0
        agent.wait_idle()
        empty(engine)
        assert ask(engine, 0)[1] == 3 * CHUNK

        # Redis is stopped during a lookup: at most the deadline, then it is computed.
        agent.restart()
        wait_until(lambda: ready(agent), what="the engine at the new agent")
        redis_server.stop()
        empty(engine)
        seconds, cached = ask(engine, 1)
        assert cached == 0
        assert seconds < NO_HANG_S
        wait_until(lambda: not agent.status()["redis"]["up"], what="an open breaker")
        redis_server.cont()
        wait_until(lambda: agent.status()["redis"]["up"], what="Redis back")
        empty(engine)
        assert ask(engine, 2)[1] == 3 * CHUNK

        # A damaged value: a miss from there on.
        with redis_server.client() as client:
            for key in stripe_keys(client):
                value = bytearray(client.get(key))
                value[-1] ^= 1
                client.set(key, bytes(value))
        empty(engine)
        assert ask(engine, 3)[1] == 0
        assert agent.counter("miss_corrupt") > 0
        redis_server.command("FLUSHALL")  # the other damaged values would only be found in turn

        # Half a chunk, as eviction leaves it: a miss too.
        assert ask(engine, 5)[1] == 0
        agent.wait_idle()
        agent.restart()
        wait_until(lambda: ready(agent), what="the engine at the new agent")
        with redis_server.client() as client:
            client.delete(*[key for key in stripe_keys(client) if parse_stripe_key(key)[2] > 0])
        empty(engine)
        assert ask(engine, 5)[1] == 0
        assert agent.counter("miss_incomplete") > 0

        # The agent is killed while a request is being answered, and comes back.
        agent.wait_idle()
        empty(engine)
        engine.begin_generate([questions[4]], 4)
        agent.kill()
        answer = engine.finish()
        assert answer.outputs[0] == expected[4]
        assert answer.seconds < NO_HANG_S
        empty(engine)
        assert ask(engine, 5)[1] == 0
        agent.start()
        wait_until(lambda: ready(agent), what="the engine registered again")
        empty(engine)
        ask(engine, 6)
        agent.wait_idle()
        empty(engine)
        assert ask(engine, 6)[1] == 3 * CHUNK

        # Redis is killed while a request loads from it.
        agent.wait_idle()
        agent.restart()
        wait_until(lambda: ready(agent), what="the engine at the new agent")
        empty(engine)
        engine.begin_generate([questions[6]], 4)
        time.sleep(0.005)
        redis_server.kill()
        answer = engine.finish()
        assert answer.outputs[0] == expected[6]
        assert answer.seconds < NO_HANG_S

        # Redis is full, and killed: the answers are right, and the engine keeps running.
        redis_server.start()
        redis_server.config_set("maxmemory-policy", "noeviction")
        redis_server.config_set("maxmemory", "2mb")
        empty(engine)
        ask(engine, 7)
        redis_server.kill()
        empty(engine)
        ask(engine, 0)

        # Requests that are aborted in a lookup or a load leave nothing behind.
        for delay_s in (0.0, 0.002, 0.01, 0.05):
            empty(engine)
            engine.abort_after(questions[6], delay_s)
        ask(engine, 6)
        wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")
        assert agent.status()["pool"]["pinned_slots"] == 0
    assert "Traceback" not in agent.log
