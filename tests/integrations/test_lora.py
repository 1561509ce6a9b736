# SPDX-License-Identifier: Apache-2.0
"""Another LoRA adapter at the path of an older one: its requests never hit the older one's KV."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.support import adapters_only
from tests.engines import PATCH_VARIABLE
from tests.harness import AgentServer
from tests.integrations.conftest import Prompts
from tests.integrations.test_vllm import CHUNK, start

pytestmark = [pytest.mark.engine, pytest.mark.long]

RANK, HIDDEN, LAYERS = 8, 256, 4


def write_adapter(directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 64,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in config["target_modules"]:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (HIDDEN, RANK))):
                tensors[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")


def test_a_replaced_adapter_does_not_hit(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    question = prompts.tokens(2 * CHUNK + 10)
    path, elsewhere = tmp_path / "adapter", tmp_path / "elsewhere"
    write_adapter(path, seed=1)
    write_adapter(elsewhere, seed=2)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    with start(model_dir, agent, tmp_path / "engine.log", **options) as engine:

        def ask(lora: tuple[str, int, str] | None) -> tuple[list[int], int]:
            assert engine.reset_prefix_cache()
            answer = engine.generate([question], 8, lora=lora)
            agent.wait_idle()
            return answer.outputs[0], answer.details["cached_tokens"][0]

        plain, _ = ask(None)
        first, cached = ask(("tuned", 1, str(path)))
        assert cached == 0
        assert first != plain
        assert ask(("tuned", 1, str(path))) == (first, 2 * CHUNK)

        write_adapter(path, seed=2)
        # In vLLM's own cache, which is not reset, its blocks are those of the older one.
        longer = [*question, *prompts.tokens(2 * CHUNK)]
        stale = engine.generate([longer], 8, lora=("tuned", 3, str(path)))
        assert stale.details["cached_tokens"][0] >= 2 * CHUNK
        agent.wait_idle()
        expected, _ = ask(("elsewhere", 2, str(elsewhere)))
        assert expected != first
        assert ask(("tuned", 3, str(path))) == (expected, 0)  # vLLM's own hashes are the same
        assert ask(("tuned", 3, str(path))) == (expected, 2 * CHUNK)
        # The first id was dropped from memory, and is read again.
        assert ask(("tuned", 1, str(path))) == (expected, 2 * CHUNK)
        # This vLLM computes a prompt without an adapter, beside some with one, with one of them.
        assert ask(None) == (plain, 0 if needs_adapters() else 2 * CHUNK)


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
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    with start(model_dir, agent, tmp_path / "engine.log", env=patch, **options) as engine:
        alone = engine.generate([question], 8).outputs[0]
        assert engine.reset_prefix_cache()
        engine.step("mixed")
        assert json.loads((tmp_path / "mixed").read_text()) != alone  # vLLM's own fault
        agent.wait_idle()
        assert agent.counter("stores") > 0  # of the adapters
    assert "prompts without an adapter are not cached" in (tmp_path / "engine.log").read_text()
    for number, other in enumerate(({}, options)):
        with start(model_dir, agent, tmp_path / f"{number}.log", **other) as engine:
            answer = engine.generate([question], 8)
            assert answer.outputs[0] == alone
            assert answer.details["cached_tokens"] == [0]
            agent.wait_idle()
