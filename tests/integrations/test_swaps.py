# SPDX-License-Identifier: Apache-2.0
"""Files of models and adapters that change once vLLM has read them: what is in memory counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import PATCH_VARIABLE, ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts, make_model
from tests.integrations.test_lora import RANK, write_adapter
from tests.integrations.test_vllm import CHUNK, ready, start

pytestmark = [pytest.mark.engine, pytest.mark.long]

PATCH = {PATCH_VARIABLE: str(Path(__file__).with_name("swaps.py"))}
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": RANK}
Adapter = tuple[Any, ...]
Ask = Callable[..., tuple[list[int], int]]


@pytest.fixture
def ask(agent: AgentServer, prompts: Prompts) -> Ask:
    """Asks one question: the answer, and how many of its tokens were cached."""
    question = prompts.tokens(2 * CHUNK + 10)

    def ask(engine: ForkedEngine, lora: Adapter | None = None) -> tuple[list[int], int]:
        empty(engine)
        answer = engine.generate([question], 8, lora=lora)
        agent.wait_idle()
        return answer.outputs[0], answer.details["cached_tokens"][0]

    return ask


def add(engine: ForkedEngine, adapter: Adapter) -> None:
    engine._send({"do": "add_lora", "lora": adapter})
    engine.finish()


def test_an_adapter_is_what_vllm_has_read(
    model_dir: Path, agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    path, other = tmp_path / "adapter", tmp_path / "other"
    write_adapter(path, seed=1)
    write_adapter(other, seed=3)
    tuned, another = ("tuned", 1, str(path)), ("another", 2, str(other))
    with start(model_dir, agent, tmp_path / "one.log", env=PATCH, **LORA) as engine:
        add(engine, tuned)
        write_adapter(path, seed=2)
        first, cached = ask(engine, tuned)  # memory has the files of before
        assert cached == 0
        assert ask(engine, tuned) == (first, 2 * CHUNK)

        # It is dropped for another, and read again.
        third, cached = ask(engine, another)
        assert cached == 0
        assert third != first
        second, cached = ask(engine, tuned)
        assert cached == 0
        assert second not in (first, third)
        assert ask(engine, tuned) == (second, 2 * CHUNK)

        write_adapter(path, seed=1)
        assert ask(engine, tuned) == (second, 2 * CHUNK)
        add(engine, (*tuned, None, True))  # in place
        assert ask(engine, tuned) == (first, 2 * CHUNK)
        assert ask(engine, (*tuned, None, True)) == (first, 2 * CHUNK)
        write_adapter(path, seed=2)
        assert ask(engine, (*tuned, None, True))[0] == second  # vLLM reads it in this step
        assert ask(engine, tuned) == (second, 2 * CHUNK)
    with start(model_dir, agent, tmp_path / "two.log", env=PATCH, **LORA) as engine:
        # Another replica hits with its first request, which makes vLLM read the adapter.
        assert ask(engine, tuned) == (second, 2 * CHUNK)
        assert ask(engine, another) == (third, 2 * CHUNK)
        write_adapter(path, seed=1)
        assert ask(engine, tuned) == (first, 2 * CHUNK)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions of a model."""
    return make_model(tmp_path / "v1" / "m", seed=1), make_model(tmp_path / "v2" / "m", seed=2)


def test_model_files_that_change_in_a_start_are_not_known(
    models: tuple[Path, Path], agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    model, newer = models
    log, env = tmp_path / "one.log", {**PATCH, "SWAPPED_IN": str(newer)}
    with start(model, None, log, kv_transfer=transfer_config(agent.endpoint), env=env) as engine:
        first, cached = ask(engine)
        assert cached == 0
        assert ask(engine) == (first, 0)
        assert "has changed since this engine started" in log.read_text()
    transfer = transfer_config(agent.endpoint, weights_id="mine")
    with start(model, agent, log, kv_transfer=transfer, env=env) as engine:
        second, cached = ask(engine)
        assert cached == 0
        assert second != first
        assert ask(engine) == (second, 2 * CHUNK)


def test_an_engine_that_wakes_keeps_the_name_of_its_weights(
    models: tuple[Path, Path], agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    model, newer = models
    with start(model, agent, tmp_path / "one.log", env=PATCH) as engine:
        first, cached = ask(engine)
        assert cached == 0
        engine.step("sleep")
        shutil.copytree(newer, model, dirs_exist_ok=True)
        engine.step("wake")
        wait_until(lambda: ready(agent), what="the engine registered again")
        wait_until(lambda: ask(engine) == (first, 2 * CHUNK), what="a hit")
    with start(model, agent, tmp_path / "two.log", env=PATCH) as engine:
        second, cached = ask(engine)
        assert cached == 0
        assert second != first
