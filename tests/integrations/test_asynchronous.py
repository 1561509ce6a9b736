# SPDX-License-Identifier: Apache-2.0
"""Engines of tests schedule asynchronously, as on GPUs, wherever vLLM itself would."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.asynchronous import OVERLAPPED, SAID
from tests.engines import PATCH_VARIABLE, ForkedEngine, transfer_config
from tests.harness import AgentServer
from tests.integrations.conftest import OPTIONS, Prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def test_steps_overlap_and_answers_are_those_of_synchronous_ones(
    model_dir: Path, tmp_path: Path, agent: AgentServer, prompts: Prompts
) -> None:
    asked = [prompts.tokens(count) for count in (513, 600, 700)]
    answers = {}
    for name, options, asynchronous in (
        ("synchronous", {}, False),
        ("ngram", {"speculative_config": _NGRAM}, True),
        ("asynchronous", {}, True),
    ):
        log_path = tmp_path / f"{name}.log"
        with ForkedEngine(
            model_dir,
            kv_transfer=transfer_config(agent.endpoint) if name == "asynchronous" else None,
            log_path=log_path,
            options=OPTIONS | options,
            env=_ENV,
            asynchronous=asynchronous,
        ) as engine:
            answers[name] = engine.generate(asked, 12).outputs
            if name == "asynchronous":
                agent.wait_idle()
                assert engine.reset_prefix_cache()
                again = engine.generate(asked, 12)
                assert sum(again.details["cached_tokens"]) == 512 * 3
                answers["loaded"] = again.outputs
        log = log_path.read_text()
        assert (f"{SAID}2" in log) == (OVERLAPPED in log) == (name == "asynchronous")
    assert answers["synchronous"] == answers["asynchronous"] == answers["loaded"]


@pytest.mark.long
@pytest.mark.parametrize("cache", ["none", "on", "off"])
def test_resets_succeed_while_a_step_is_in_flight(
    cache: str, model_dir: Path, tmp_path: Path, agent: AgentServer, prompts: Prompts
) -> None:
    """As without a connector, in a process that also steps the engine."""
    patch = Path(__file__).with_name("resets.py")
    env = {**_ENV, PATCH_VARIABLE: str(patch), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    # A setting that does not exist: the cache stays off.
    wrong = {"unknown": 1} if cache == "off" else {}
    transfer = transfer_config(agent.endpoint, **wrong)
    with ForkedEngine(
        model_dir,
        kv_transfer=None if cache == "none" else transfer,
        log_path=tmp_path / "engine.log",
        options=OPTIONS,
        env=env,
    ) as engine:
        engine._send({"do": "resets", "prompts": [prompts.tokens(n) for n in (300, 520, 600)]})
        found = engine.finish().details
    log = (tmp_path / "engine.log").read_text()
    assert ("the cache stays off" in log) == (cache == "off")
    assert "is now off" not in log
    for name in ("reset", "pause"):
        assert found[name] == {"in_flight": 1, "done": True, "local": 0}, name
    for step in (3, 4, 9):
        assert found[f"running {step}"] == {"in_flight": 1, "done": True}
    assert found["again"] == found["answers"]
