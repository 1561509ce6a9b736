# SPDX-License-Identifier: Apache-2.0
"""Models with real random weights, and what an engine test needs around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asynchronous import OVERLAPPED
from tests.engines import ForkedEngine
from tests.harness import AgentServer
from tests.matrix.models import write_model
from tests.servers import RedisServer

try:
    # Now, because its import starts a process, which a unit test must not.
    from vllm.model_executor.models import registry as vllm_models
except ImportError:
    vllm_models = None

VOCABULARY = 4000
# Blocks of 32,768 tokens. To lay out a GiB of them and to share it takes as long as the rest of a
# start.
OPTIONS = {"dtype": "float32", "max_model_len": 2048, "num_gpu_blocks_override": 256}
# Of an agent. A chunk of the models has several slots.
SIZES = {"chunk_size_tokens": 256, "slot_bytes": (1 << 20) - 4096, "pool_bytes": 256 << 20}


KV_HEADS = 4


def make_model(directory: Path, seed: int) -> Path:
    """A small Llama whose greedy tokens differ by prompt."""
    return write_model("llama", directory, seed=seed, num_key_value_heads=KV_HEADS)


@pytest.fixture(scope="session", autouse=True)
def inspect_models_in_process() -> Iterator[None]:
    """vLLM starts a process for the class of a model that it has not seen on this machine.

    It also forgets a class when another version of vLLM has seen it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if vllm_models is not None:
            patch.setattr(vllm_models, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedEngine]:
    """What the answers of ``model_dir`` have to be: no connector, and no steps that overlap."""
    log_path = tmp_path_factory.mktemp("plain") / "engine.log"
    with ForkedEngine(model_dir, log_path=log_path, options=OPTIONS, asynchronous=False) as engine:
        yield engine
    assert OVERLAPPED not in log_path.read_text()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    sizes = SIZES | {"pool_bytes": 512 << 20}
    with AgentServer(tmp_path / "agent", redis_server.unix_url, **sizes) as server:
        yield server


class Prompts:
    """Prompts of random tokens, the same in every run."""

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, VOCABULARY) for _ in range(count)]


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()
