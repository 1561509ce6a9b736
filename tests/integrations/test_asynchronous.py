# SPDX-License-Identifier: Apache-2.0
"""Engines of tests schedule asynchronously, as on GPUs, wherever vLLM itself would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    with start(model_dir, tmp_path / "synchronous.log", asynchronous=False) as engine:
        expected = engine.generate(asked, 12).outputs
    cached, log = transfer_config(agent.endpoint), tmp_path / "asynchronous.log"
    with start(model_dir, log, kv_transfer=cached) as engine:
        assert engine.generate(asked, 12).outputs == expected
        agent.wait_idle()
        assert engine.reset_prefix_cache()
        again = engine.generate(asked, 12)
        assert sum(again.details["cached_tokens"]) == 512 * 3
        assert again.outputs == expected
    assert overlaps(log)
    assert not overlaps(tmp_path / "synchronous.log")


@pytest.mark.long
def test_drafts_from_the_prompt_do_not_overlap(
    model_dir: Path, tmp_path: Path, prompts: Prompts
) -> None:
    log = tmp_path / "ngram.log"
    with start(model_dir, log, speculative_config=_NGRAM) as engine:
        engine.generate([prompts.tokens(513)], 12)
    assert not overlaps(log)


def start(
    model_dir: Path,
    log: Path,
    kv_transfer: dict[str, Any] | None = None,
    asynchronous: bool = True,
    **options: object,
) -> ForkedEngine:
    return ForkedEngine(
        model_dir,
        kv_transfer=kv_transfer,
        log_path=log,
        options=OPTIONS | options,
        env=_ENV,
        asynchronous=asynchronous,
    )


def overlaps(log: Path) -> bool:
    found = {each in log.read_text() for each in (f"{SAID}2", OVERLAPPED)}
    assert len(found) == 1
    return found.pop()


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
