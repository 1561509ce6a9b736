# SPDX-License-Identifier: Apache-2.0
"""Real vLLMs on the CPU with vLLM's own OffloadingConnector and the tier in Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import ForkedEngine, empty
from tests.integrations.conftest import OPTIONS, Prompts
from tests.scraping import samples_in
from tests.servers import RedisServer, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

CHUNK = 128


def start(
    model: Path, redis: RedisServer, log: Path, ranks: int = 1, block_size: int = CHUNK
) -> ForkedEngine:
    extra: dict[str, Any] = {
        "spec_name": "CPUTieringOffloadingSpec",
        "spec_module_path": "lmcache_redis.integrations.vllm_tier",
        "cpu_bytes_to_use": 128 << 20,
        "block_size": block_size,
        "canonical_layout": True,
        "secondary_tiers": [{"type": "redis", "url": redis.unix_url, "timeout_s": 50.0}],
    }
    return ForkedEngine(
        model,
        kv_transfer={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
        log_path=log,
        options={**OPTIONS, "tensor_parallel_size": ranks, "disable_log_stats": False},
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}),
        },
    )


def counted(engine: ForkedEngine, outcome: str) -> float:
    """Chunks of the tier, as vLLM's own page counts them."""
    engine.generate([[1] * 20], 1)  # a step, which takes the counts to the page
    return sum(
        value
        for (name, labels), value in samples_in(engine.metrics()).items()
        if name == "lmcache_redis_tier_chunks_total" and outcome in labels
    )


def test_engines_hit_in_redis_what_others_stored(
    plain: ForkedEngine,
    model_dir: Path,
    redis_server: RedisServer,
    tmp_path: Path,
    prompts: Prompts,
) -> None:
    one, exact = prompts.tokens(6 * CHUNK + 1), prompts.tokens(2 * CHUNK)
    batch = [prompts.tokens(CHUNK + 30 + n) for n in range(4)]
    questions, lost = [[one], [exact], batch], [prompts.tokens(3 * CHUNK + 5)]
    expected = [plain.generate(question, 8).outputs for question in questions]
    expected_lost = plain.generate(lost, 8).outputs

    with start(model_dir, redis_server, tmp_path / "cold.log") as engine:
        for question, answer in zip(questions, expected, strict=True):
            cold = engine.generate(question, 8)
            assert cold.outputs == answer
            assert set(cold.details["cached_tokens"]) == {0}
        wait_until(lambda: counted(engine, "stored_chunks") == 12, "stored chunks")

    # Their CPU tiers are empty. Two ranks use what one has stored: the layout is canonical.
    for ranks in (1, 2):
        with start(model_dir, redis_server, tmp_path / f"warm{ranks}.log", ranks) as engine:
            hits = []
            for question, answer in zip(questions, expected, strict=True):
                warm = engine.generate(question, 8)
                assert warm.outputs == answer
                hits += warm.details["cached_tokens"]
            assert hits == [6 * CHUNK, 2 * CHUNK, *[CHUNK] * 4]
            assert counted(engine, "loaded_chunks") == 12
            if ranks > 1:
                continue
            empty(engine)  # from here on it hits in its own CPU tier too
            redis_server.stop()
            assert engine.generate(lost, 8).outputs == expected_lost
            assert engine.generate([one], 8).outputs == expected[0]
            redis_server.cont()
            assert engine.generate([one], 8).outputs == expected[0]
