# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose every hit is a canary: other KV under one name is found at the first hit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.client.control import ControlClient
from tests.engines import PATCH_VARIABLE, ForkedEngine, empty
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.test_vllm import CHUNK
from tests.integrations.test_vllm import start as start_engine
from tests.matrix.models import write_adapter, write_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "num_gpu_blocks_override": 256,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
}
ONE_NAME = Path(__file__).with_name("one_name.py")


def other_weights(model: Path, directory: Path) -> Path:
    """The same architecture and name with other weights."""
    return write_model("llama", directory / model.name, seed=1)


def replace_adapter(adapter: Path) -> None:
    """Writes other weights in the place of an adapter's."""
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    flipped = {name: each.flip(0).contiguous() for name, each in load_file(path).items()}
    save_file(flipped, path)


def start(
    model: Path,
    agent: AgentServer,
    log: Path,
    *,
    patch: Path = ONE_NAME,
    options: Mapping[str, Any] = OPTIONS,
    **env: str,
) -> ForkedEngine:
    """An engine with the faults of ``patch``: other KV has the same names."""
    return start_engine(model, agent, log, env={PATCH_VARIABLE: str(patch), **env}, **options)


def ask(
    engine: ForkedEngine,
    agent: AgentServer,
    *questions: list[int],
    parts: int | None = None,
    **of: Any,
) -> Any:
    """Answers with an empty prefix cache, after which everything is stored and compared.

    parts: how many that is, of a model with several groups.
    """

    def handled() -> int:
        counters = agent.counters()
        return sum(counters[f"{how}_chunks"] for how in ("stored", "compared", "uncompared"))

    empty(engine)
    expected = handled() + (parts or sum(len(question) // CHUNK for question in questions))
    answer = engine.generate(list(questions), 4, **of)
    wait_until(lambda: handled() == expected, what="all stores and comparisons")
    agent.wait_idle()
    return answer


def test_other_kv_under_one_name_is_found(
    agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    agent.end()
    agent._settings["canary_every"] = 1
    agent.start()
    model = write_model("llama", tmp_path / "models" / "tiny")
    second = other_weights(model, tmp_path / "second")
    adapter = write_adapter(tmp_path / "adapter")
    # Prompts without one are not cached beside it, on a CPU.
    first = ("adapter", 1, str(adapter))
    long, short = prompts.tokens(4 * CHUNK + 9), prompts.tokens(2 * CHUNK + 9)
    mixed = [prompts.tokens(CHUNK + 30 * n) for n in range(4)]

    with start(model, agent, tmp_path / "first.log") as engine:
        # What is right agrees, whatever else is computed in the same steps.
        expected = ask(engine, agent, long, lora=first).outputs
        ask(engine, agent, short, lora=first)
        again = ask(engine, agent, *mixed, long, short, lora=first)
        assert again.outputs[4] == expected[0]
        assert again.details["cached_tokens"] == [0] * 6
        assert agent.counter("compared_chunks") == 6
        assert agent.counter("differing_chunks") == 0
        assert agent.counter("uncompared_chunks") == 0

        one = ask(engine, agent, short, lora=first).outputs
        replace_adapter(adapter)
        other = ask(engine, agent, short, lora=("adapter", 2, first[2])).outputs
        assert one != other
        assert agent.counter("differing_chunks") == 2
        assert agent.log.count("is not what its engine has computed") == 1
        assert ControlClient(agent.endpoint).trust() == 1

    with start(second, agent, tmp_path / "second.log") as engine:
        answer = ask(engine, agent, long, lora=first)
        assert answer.outputs != expected
        assert answer.details["cached_tokens"] == [0]
        assert agent.counter("differing_chunks") == 6
        # Until it is trusted again, nothing is loaded, and what differed is stored anew.
        assert ask(engine, agent, long, lora=first).outputs == answer.outputs
        assert agent.counter("retrieved_chunks") == 0
        assert ask(engine, agent, long, lora=first).outputs == answer.outputs
        assert agent.counter("differing_chunks") == 6
        assert agent.status()["canaries"]["distrusted"][0]["agreed"] == 1
