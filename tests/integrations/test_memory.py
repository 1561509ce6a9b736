# SPDX-License-Identifier: Apache-2.0
"""The connector frees what it makes for requests and transfers without the garbage collector."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.cycles import left_by
from tests.integrations.played import PlayedEngine
from tests.integrations.test_groups import full, state, window
from tests.integrations.test_hybrid_scheduler import CHUNK, use
from tests.integrations.test_hybrid_scheduler import config_dir as config_dir


def test_requests(config_dir: Path) -> None:
    """Loads and stores, failed ones and canaries among them, aborts, preemptions and resets."""
    rng, specs = random.Random(1), [state(8), full(8), window(12, block=8)]
    engine = PlayedEngine(config_dir, specs, chunk_tokens=CHUNK, num_blocks=300, rng=rng, fail=0.2)
    engine.agent.canary_every = 3

    def run(number: int) -> None:
        use(engine, rng, 5)
        for kept in (engine._memory._by_hash, engine.agent.parts, engine.agent.pinned):
            kept.clear()

    assert left_by(run, 20, lambda: None) == []
    assert engine.counts.loads > 10
    assert engine.counts.finished > 100
