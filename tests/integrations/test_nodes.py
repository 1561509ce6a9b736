# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose ranks have agents of their own, as on two nodes, and cores that share an id.

One machine plays both nodes: a patch gives rank 1's worker another endpoint. The agents share
nothing but Redis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import PATCH_VARIABLE, PROGRAM_VARIABLE, ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import SIZES, Prompts
from tests.integrations.test_vllm import CHUNK
from tests.integrations.test_vllm import start as start_engine
from tests.servers import RedisServer

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

# What only a hang reaches: two ranks on a busy machine are slow.
NO_HANG_S = 300.0

PATCH = """
from lmcache_redis.integrations.vllm import setup

class WorkerOfItsNode(setup.WorkerClient):
    def __init__(self, endpoint, *args, **kwargs):
        super().__init__({endpoints}[kwargs["worker_id"]], *args, **kwargs)

setup.WorkerClient = WorkerOfItsNode
"""


@pytest.fixture
def agents(
    agent: AgentServer, tmp_path: Path, redis_server: RedisServer
) -> Iterator[list[AgentServer]]:
    with AgentServer(tmp_path / "other", redis_server.unix_url, **SIZES) as other:
        yield [agent, other]


def registered(agent: AgentServer) -> list[int]:
    return [engine["worker_id"] for engine in agent.status()["engines"]]


def start(model_dir: Path, agents: list[AgentServer], log: Path) -> ForkedEngine:
    patch = log.with_suffix(".py")
    patch.write_text(PATCH.format(endpoints=json.dumps([agent.endpoint for agent in agents])))
    return start_engine(
        model_dir,
        None,  # of its two agents
        log,
        # Long, because an agent that is killed is noticed at once.
        kv_transfer=transfer_config(agents[0].endpoint, agent_dead_after_s=20.0),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1", PATCH_VARIABLE: str(patch)},
        tensor_parallel_size=2,
    )


def wait_registered(agents: list[AgentServer]) -> None:
    wait_until(lambda: [registered(agent) for agent in agents] == [[0], [1]], "both ranks")


def test_each_rank_loads_at_the_agent_of_its_node(
    model_dir: Path, agents: list[AgentServer], tmp_path: Path, prompts: Prompts
) -> None:
    questions = [prompts.tokens(2 * CHUNK + 10) for _ in range(2)]
    with start(model_dir, agents, tmp_path / "cold.log") as engine:
        wait_registered(agents)
        cold = engine.generate(questions, 2)
        assert cold.details["cached_tokens"] == [0, 0]
        for agent in agents:
            wait_until(lambda agent=agent: agent.counter("gathered_chunks") == 4, "both stores")
            agent.wait_idle()

    for agent in agents:
        agent.restart()
    local, other = agents
    with start(model_dir, agents, tmp_path / "warm.log") as engine:
        wait_registered(agents)

        def begin(number: int) -> None:
            empty(engine)
            engine.begin_generate([questions[number]], 2)

        def finish(number: int) -> int:
            answer = engine.finish()
            assert answer.outputs[0] == cold.outputs[number]
            assert answer.seconds < NO_HANG_S
            cached: int = answer.details["cached_tokens"][0]
            return cached

        def ask(number: int) -> int:
            begin(number)
            return finish(number)

        # The very first request hits, from Redis.
        assert [ask(number) for number in range(2)] == [2 * CHUNK] * 2
        for agent in agents:
            assert agent.counter("loaded_chunks") == 4
            assert agent.counter("retrieved_chunks") == 4

        # The other agent is killed in the middle of a load.
        other.stop()
        retrieves = local.counter("retrieves")
        begin(0)
        wait_until(lambda: local.counter("retrieves") > retrieves, "a load")
        other.kill()
        finish(0)

        # While it is gone there are no hits, and nothing waits for it.
        assert ask(1) == 0

        # When it is back, its worker tells the scheduler in its next step.
        other.start()
        wait_registered(agents)
        ask(0)
        assert ask(1) == 2 * CHUNK
        assert other.counter("loaded_chunks") >= 2
        for agent in agents:
            wait_until(lambda agent=agent: agent.status()["sessions"] == 0, "ended sessions")
            agent.wait_idle()  # chunks that wait to be written are pinned
            assert agent.status()["pool"]["pinned_slots"] == 0
    for agent in agents:
        assert "Traceback" not in agent.log
    assert "cache of this engine is now off" not in (tmp_path / "warm.log").read_text()


def test_data_parallel_cores_with_one_agent_both_hit(
    model_dir: Path, agent: AgentServer, tmp_path: Path
) -> None:
    # With an explicit id, which they share.
    transfer = {**transfer_config(agent.endpoint), "engine_id": "shared"}
    env = {PROGRAM_VARIABLE: "tests.integrations.data_parallel"}
    env["VLLM_CPU_OMP_THREADS_BIND"], log = "0|1", tmp_path / "engine.log"
    with start_engine(
        model_dir, None, log, kv_transfer=transfer, env=env, data_parallel_size=2
    ) as program:
        program._send({"do": "ask"})
        answers = program.finish().details["answers"]
    assert len({tuple(tokens) for tokens, _ in answers}) == 1
    assert [cached for _, cached in answers] == [0, *[2 * CHUNK] * 3]
    assert agent.counter("registrations") == 2
