# SPDX-License-Identifier: Apache-2.0
"""Real engines of several TP sizes, with ``share_across_tp``: each hits what others have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import ForkedEngine, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.test_vllm import CHUNK, start
from tests.matrix.models import write_model
from tests.servers import RedisServer

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")


def start_sharing(
    model_dir: Path, agent: AgentServer, log: Path, ranks: int, **extra: Any
) -> ForkedEngine:
    settings = {"share_across_tp": True, "agent_dead_after_s": 20.0, **extra}
    return start(
        model_dir, agent, log,
        kv_transfer=transfer_config(agent.endpoint, **settings),
        tensor_parallel_size=ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "heads"),
    [("llama", 4), ("llama", 1), ("gemma3", 2)],
    ids=["Llama", "Llama, one head", "Gemma-3, windows beside"],
)
def test_each_size_hits_what_the_other_has_stored(
    tmp_path: Path, agent: AgentServer, prompts: Prompts, model: str, heads: int
) -> None:
    model_dir = write_model(model, tmp_path / "model", num_key_value_heads=heads)
    questions = [prompts.tokens(2 * CHUNK + 10) for _ in range(2)]
    answers: dict[int, list[list[int]]] = {}
    sizes = [(1, [0, 0]), (2, [2 * CHUNK, 0]), (1, [2 * CHUNK] * 2)]
    for number, (ranks, cached) in enumerate(sizes):
        # The first knows one prompt; the second stores the other, and the third hits both.
        asked = questions[:1] if number == 0 else questions
        log = tmp_path / f"{number}.log"
        with start_sharing(model_dir, agent, log, ranks) as engine:
            answer = engine.generate(asked, 4)
            assert answer.details["cached_tokens"] == cached[: len(asked)]
            for question, tokens in enumerate(answer.outputs):
                assert answers.setdefault(question, tokens) == tokens
            agent.wait_idle()
        agent.restart()
    assert "Traceback" not in agent.log


def test_sizes_differ_by_rounding_alone(
    model_dir: Path, tmp_path: Path, redis_server: RedisServer, prompts: Prompts
) -> None:
    """Canaries of one size compare what it has computed with what another has stored."""
    question = prompts.tokens(2 * CHUNK + 10)
    sizes = {"chunk_size_tokens": CHUNK, "slot_bytes": (1 << 20) - 4096, "pool_bytes": 256 << 20}
    for ranks in (1, 2):
        directory = tmp_path / f"TP {ranks}"
        with (
            AgentServer(directory, redis_server.unix_url, canary_every=1, **sizes) as agent,
            start_sharing(model_dir, agent, directory / "log", ranks, kv_shares=2) as engine,
        ):
            answer = engine.generate([question], 4)
            assert answer.details["cached_tokens"] == [0], "it is new, and then a canary"
            agent.wait_idle()
            compared = 0 if ranks == 1 else 2 * 2  # chunks, shares
            wait_until(lambda a=agent, n=compared: a.counter("compared_chunks") == n, "canaries")
            assert agent.counter("differing_chunks") == 0
