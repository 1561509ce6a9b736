# SPDX-License-Identifier: Apache-2.0
"""Real engines of several TP sizes, with ``share_across_tp``: each hits what others have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import ForkedEngine, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import SIZES, Prompts
from tests.integrations.test_vllm import CHUNK, start
from tests.integrations.test_vllm_tier_engine import counted
from tests.integrations.test_vllm_tier_engine import start as start_tier
from tests.matrix.models import write_model
from tests.servers import RedisServer, stripe_keys
from tests.value_reader import Chunk, Key, read_chunks, read_key

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
    [("llama", 1), ("gemma3", 2)],
    ids=["one head, which both ranks have", "windows beside"],
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
            if number < 2:
                parts = 2 * min(ranks, heads)
                wait_until(lambda least=parts: agent.counter("stored_chunks") >= least, "stores")
            agent.wait_idle()
        agent.restart()
    assert "Traceback" not in agent.log


def test_sizes_differ_by_rounding_alone(
    model_dir: Path, tmp_path: Path, redis_server: RedisServer, prompts: Prompts
) -> None:
    """Canaries of one size compare what it has computed with what another has stored."""
    question = prompts.tokens(2 * CHUNK + 10)
    for ranks in (1, 2):
        directory = tmp_path / f"TP {ranks}"
        with (
            AgentServer(directory, redis_server.unix_url, canary_every=1, **SIZES) as agent,
            start_sharing(model_dir, agent, directory / "log", ranks, kv_shares=2) as engine,
        ):
            answer = engine.generate([question], 4)
            assert answer.details["cached_tokens"] == [0], "it is new, and then a canary"
            agent.wait_idle()
            compared = 0 if ranks == 1 else 2 * 2  # chunks, shares
            wait_until(lambda a=agent, n=compared: a.counter("compared_chunks") == n, "canaries")
            assert agent.counter("differing_chunks") == 0


def test_a_share_that_is_lost_or_wrong_costs_its_chunk(
    tmp_path: Path, agent: AgentServer, redis_server: RedisServer, prompts: Prompts
) -> None:
    """The engine computes from there on, and answers as it does without the cache."""
    model_dir = write_model("llama", tmp_path / "model", num_key_value_heads=4)
    questions = [prompts.tokens(3 * CHUNK + 10) for _ in range(3)]
    expected: list[list[int]] = []
    shares: list[dict[Key, bytes]] = []  # of each prompt
    with start_sharing(model_dir, agent, tmp_path / "stores.log", 1) as engine:
        for question in questions:
            expected += engine.generate([question], 4).outputs
            agent.wait_idle()
            with redis_server.client() as client:
                found = {key: name for name in stripe_keys(client) if (key := read_key(name))}
            known = {key for each in shares for key in each}
            shares.append({key: name for key, name in found.items() if key not in known})
    with redis_server.client() as client:
        client.delete(next(name for key, name in shares[0].items() if key.share == 2))
        wrong = next(name for key, name in shares[1].items() if key.share == 3)
        value = bytearray(client.get(wrong))
        value[-100] ^= 1
        client.set(wrong, bytes(value))
    agent.restart()
    with start_sharing(model_dir, agent, tmp_path / "loads.log", 2) as engine:
        answers = [engine.generate([question], 4) for question in questions]
        assert [each.outputs[0] for each in answers] == expected
        cached = [each.details["cached_tokens"][0] for each in answers]
        assert max(cached[:2]) < cached[2] == 3 * CHUNK
        agent.wait_idle()
        wait_until(lambda: not agent.status()["pool"]["pinned_slots"], "no pinned slot")
    assert "Traceback" not in agent.log


def test_vllms_tier_stores_the_same_bytes_in_another_order(
    tmp_path: Path, redis_server: RedisServer, prompts: Prompts
) -> None:
    """With a canonical layout it has the heads of each block together, and other names."""
    heads, question = 4, prompts.tokens(2 * CHUNK + 10)
    model_dir = write_model("llama", tmp_path / "model", num_key_value_heads=heads)
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, compress="off", **SIZES) as agent,
        start_sharing(model_dir, agent, tmp_path / "connector.log", 1) as engine,
    ):
        answer = engine.generate([question], 4)
        agent.wait_idle()
    shares = chunks_in(redis_server)
    assert [sorted(each) for each in shares.values()] == [[*range(heads)]] * 2
    redis_server.command("FLUSHALL")
    with start_tier(model_dir, redis_server, tmp_path / "tier.log", block_size=CHUNK) as engine:
        assert engine.generate([question], 4).outputs == answer.outputs
        wait_until(lambda: counted(engine, "stored_chunks") == 2, "stored chunks")
    tier = chunks_in(redis_server)
    assert {place[0] for place in tier}.isdisjoint(place[0] for place in shares)
    for (_, chunk_hash), parts in shares.items():
        (whole,) = (each for (_, name), each in tier.items() if name.startswith(chunk_hash))
        ours = np.stack([parts[number].pages for number in range(heads)], 2)
        theirs = whole[0].pages.view(ours.dtype).reshape(ours.shape)
        assert np.array_equal(ours, theirs)


def chunks_in(server: RedisServer) -> dict[tuple[bytes, bytes], dict[int, Chunk]]:
    with server.client() as client:
        return read_chunks(stripe_keys(client), client.get)
