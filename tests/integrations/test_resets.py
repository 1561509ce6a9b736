# SPDX-License-Identifier: Apache-2.0
"""vLLM's resets with steps in flight. test_asynchronous.py has them with a real engine."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.engine.core import EngineCore

from tests.integrations.played import PlayedEngine
from tests.integrations.random_runs import CHUNK, MODELS, tokens, write_config


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("model", ["full attention", "two windows", "states"])
@pytest.mark.parametrize("running", [False, True])
def test_a_reset_succeeds_while_steps_are_in_flight(
    tmp_path: Path, model: str, running: bool, in_flight: int
) -> None:
    """vLLM frees the blocks of a request that has ended when the step in flight has, not before."""
    rng = random.Random(1)
    engine = PlayedEngine(
        write_config(tmp_path),
        MODELS[model],
        chunk_tokens=CHUNK,
        num_blocks=150,
        rng=rng,
        in_flight=in_flight,
    )
    prompt = tokens(rng, 60)
    name = engine.ask(prompt, 20)
    for _ in range(4):
        engine.step()
    if not running:
        engine.abort(name)
        assert engine.scheduler.deferred_frees
    assert engine.reset(running=running)
    assert engine.counts.deferred == 1
    free = {block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()}
    for _, blocks in engine.scheduler.deferred_frees:
        assert not free & {block.block_id for block in blocks}
    engine.ask(prompt, 5)
    engine.run()
    assert not engine.scheduler.deferred_frees


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_pause_holds_no_block_for_a_store(tmp_path: Path, in_flight: int) -> None:
    """Where vLLM runs in its caller's process, no step follows that would send the store."""
    rng = random.Random(1)
    engine = PlayedEngine(
        write_config(tmp_path),
        MODELS["full attention"],
        chunk_tokens=CHUNK,
        num_blocks=150,
        rng=rng,
        in_flight=in_flight,
    )
    prompt = tokens(rng, 60)

    core: Any = SimpleNamespace(
        reset_prefix_cache=lambda **_: engine.reset(running=True),
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
    )
    engine.ask(prompt, 1)
    while engine.asked:
        engine.step()
    assert engine.pool.get_num_free_blocks() < engine.free_blocks
    EngineCore._reset_caches(core)  # as vLLM does for a pause
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert not engine.connector.has_pending_push_work()
    engine.ask(prompt, 1)
    engine.run()
    assert engine.counts.totals()["stored_parts"] == len(prompt) // CHUNK
