# SPDX-License-Identifier: Apache-2.0
"""Adapters, and files that change once vLLM has read them: what is in memory counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.support import adapters_only
from tests.engines import PATCH_VARIABLE, ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import KV_HEADS, Prompts, make_model
from tests.integrations.test_vllm import CHUNK, ready, start
from tests.matrix import models

pytestmark = [pytest.mark.engine, pytest.mark.long]

PATCH = {PATCH_VARIABLE: str(Path(__file__).with_name("swaps.py"))}
ONE_ADAPTER = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}
TWO_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
Adapter = tuple[Any, ...]


def write_adapter(directory: Path, seed: int) -> None:
    models.write_adapter(directory, seed=seed, kv_heads=KV_HEADS)


class Ask:
    """Asks an engine one question: the answer, and how many of its tokens were cached."""

    def __init__(self, agent: AgentServer, question: list[int]) -> None:
        self.question = question
        self._agent = agent

    def __call__(self, engine: ForkedEngine, lora: Adapter | None = None) -> tuple[list[int], int]:
        empty(engine)
        answer = engine.generate([self.question], 8, lora=lora)
        self._agent.wait_idle()
        return answer.outputs[0], answer.details["cached_tokens"][0]


@pytest.fixture
def ask(agent: AgentServer, prompts: Prompts) -> Ask:
    return Ask(agent, prompts.tokens(2 * CHUNK + 10))


def add(engine: ForkedEngine, adapter: Adapter) -> None:
    engine._send({"do": "add_lora", "lora": adapter})
    engine.finish()


def test_a_replaced_adapter_does_not_hit(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts, ask: Ask
) -> None:
    path, elsewhere = tmp_path / "adapter", tmp_path / "elsewhere"
    write_adapter(path, seed=1)
    write_adapter(elsewhere, seed=2)
    with start(model_dir, agent, tmp_path / "engine.log", **TWO_ADAPTERS) as engine:
        plain, _ = ask(engine)
        first, cached = ask(engine, ("tuned", 1, str(path)))
        assert cached == 0
        assert first != plain
        assert ask(engine, ("tuned", 1, str(path))) == (first, 2 * CHUNK)

        write_adapter(path, seed=2)
        # In vLLM's own cache, which is not reset, its blocks are those of the older one.
        longer = [*ask.question, *prompts.tokens(2 * CHUNK)]
        stale = engine.generate([longer], 8, lora=("tuned", 3, str(path)))
        assert stale.details["cached_tokens"][0] >= 2 * CHUNK
        agent.wait_idle()
        expected, _ = ask(engine, ("elsewhere", 2, str(elsewhere)))
        assert expected != first
        # vLLM's own hashes are the same.
        assert ask(engine, ("tuned", 3, str(path))) == (expected, 0)
        assert ask(engine, ("tuned", 3, str(path))) == (expected, 2 * CHUNK)
        # The first id was dropped from memory, and is read again.
        assert ask(engine, ("tuned", 1, str(path))) == (expected, 2 * CHUNK)
        # This vLLM computes a prompt without an adapter, beside some with one, with one of them.
        assert ask(engine) == (plain, 0 if needs_adapters() else 2 * CHUNK)


def test_an_adapter_is_what_vllm_has_read(
    model_dir: Path, agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    path, other = tmp_path / "adapter", tmp_path / "other"
    write_adapter(path, seed=1)
    write_adapter(other, seed=3)
    tuned, another = ("tuned", 1, str(path)), ("another", 2, str(other))
    with start(model_dir, agent, tmp_path / "one.log", env=PATCH, **ONE_ADAPTER) as engine:
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
    with start(model_dir, agent, tmp_path / "two.log", env=PATCH, **ONE_ADAPTER) as engine:
        # Another replica hits with its first request, which makes vLLM read the adapter.
        assert ask(engine, tuned) == (second, 2 * CHUNK)
        assert ask(engine, another) == (third, 2 * CHUNK)
        write_adapter(path, seed=1)
        assert ask(engine, tuned) == (first, 2 * CHUNK)


def needs_adapters() -> bool:
    from vllm.config import VllmConfig

    return adapters_only(cast(VllmConfig, SimpleNamespace(lora_config=True)))


def test_a_prompt_beside_adapters_is_answered_as_alone(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    """In an engine of its own, whatever one with adapters has computed and stored."""
    if not needs_adapters():
        pytest.skip("this vLLM computes it right")
    question, paths = prompts.tokens(2 * CHUNK + 10), [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(paths):
        write_adapter(path, seed=number)
    patch = {
        PATCH_VARIABLE: str(Path(__file__).with_name("adapters.py")),
        "PROMPT": json.dumps(question),
        "ADAPTERS": json.dumps([str(path) for path in paths]),
        "MIXED": str(tmp_path / "mixed"),
    }
    with start(model_dir, agent, tmp_path / "engine.log", env=patch, **TWO_ADAPTERS) as engine:
        alone = engine.generate([question], 8).outputs[0]
        assert engine.reset_prefix_cache()
        engine.step("mixed")
        assert json.loads((tmp_path / "mixed").read_text()) != alone  # vLLM's own fault
        agent.wait_idle()
        assert agent.counter("stores") > 0  # of the adapters
    assert "prompts without an adapter are not cached" in (tmp_path / "engine.log").read_text()
    for number, other in enumerate(({}, TWO_ADAPTERS)):
        with start(model_dir, agent, tmp_path / f"{number}.log", **other) as engine:
            answer = engine.generate([question], 8)
            assert answer.outputs[0] == alone
            assert answer.details["cached_tokens"] == [0]
            agent.wait_idle()


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions of a model."""
    return make_model(tmp_path / "v1" / "m", seed=1), make_model(tmp_path / "v2" / "m", seed=2)


def test_model_files_that_change_in_a_start_are_not_known(
    versions: tuple[Path, Path], agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    model, newer = versions
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
    versions: tuple[Path, Path], agent: AgentServer, tmp_path: Path, ask: Ask
) -> None:
    model, newer = versions
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
