# SPDX-License-Identifier: Apache-2.0
"""A real vLLM gives the same answers if the connector fails, also under MultiConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.engine import EngineFailed
from tests.engines import ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.test_vllm import CHUNK, start

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

ROOT = Path(__file__).parents[2]


def faulty(endpoint: str) -> dict[str, Any]:
    return {
        **transfer_config(endpoint),
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": "tests.integrations.faulty",
    }


def under_multi_connector(endpoint: str) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [faulty(endpoint)]},
    }


def faults_of(file: Path) -> dict[str, str]:
    """An environment in which what is written to the file fails."""
    file.write_text("")
    return {"LMCACHE_REDIS_TEST_FAULT": str(file), "PYTHONPATH": str(ROOT)}


TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("wrapped", "breaks", "options"),
    [
        (under_multi_connector, "worker", {}),
        (faulty, "scheduler", TWO_RANKS),  # one rank's loads fail, the other's do not
    ],
)
def test_answers_stay_right_whatever_of_ours_fails(
    plain: ForkedEngine,
    model_dir: Path,
    agent: AgentServer,
    tmp_path: Path,
    prompts: Prompts,
    wrapped: Any,
    breaks: str,
    options: dict[str, Any],
) -> None:
    questions = [prompts.tokens(3 * CHUNK + 10) for _ in range(3)]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if options else {}
    expected = [plain.generate([q], 4).outputs[0] for q in questions]
    fault, transfer = tmp_path / "fault", wrapped(agent.endpoint)
    env, log = {**threads, **faults_of(fault)}, tmp_path / "engine.log"
    with start(model_dir, agent, log, kv_transfer=transfer, env=env, **options) as engine:

        def ask(number: int) -> int:
            empty(engine)
            answer = engine.generate([questions[number]], 4)
            assert answer.outputs[0] == expected[number]
            return int(answer.details["cached_tokens"][0])

        assert [ask(n) for n in range(3)] == [0, 0, 0]
        agent.wait_idle()
        assert ask(0) == 3 * CHUNK

        fault.write_text("refused")  # vLLM's own policy would fail the request
        assert ask(1) == 0
        fault.write_text("")
        assert ask(1) == 3 * CHUNK

        fault.write_text(breaks)
        assert ask(2) == 0
        assert ask(2) == 0  # off
        # No block is held: otherwise vLLM could not reset its cache.
        assert engine.reset_prefix_cache()
    said = log.read_text(errors="replace")
    assert said.count("the cache of this engine is now off") == 1
    assert "Traceback" in said


def test_a_step_that_fails_is_not_stored(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    fault, transfer = tmp_path / "fault", faulty(agent.endpoint)
    env, log = faults_of(fault), tmp_path / "engine.log"
    with start(model_dir, agent, log, kv_transfer=transfer, env=env) as engine:
        engine.generate([prompts.tokens(3 * CHUNK + 10)])
        wait_until(lambda: agent.counter("stored_chunks") == 3, what="the store")
        fault.write_text("output")
        with pytest.raises(EngineFailed):
            engine.generate([prompts.tokens(3 * CHUNK + 10)])
    agent.wait_idle()
    assert agent.counter("stored_chunks") == 3
