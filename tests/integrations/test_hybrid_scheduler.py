# SPDX-License-Identifier: Apache-2.0
"""Models with several kinds of KV cache in vLLM's own scheduler: every token read is right.

`played.py` says what is checked in each step: a load writes exactly the blocks that are neither
null nor local, names only parts that the lookup has pinned, and touches no block of another
request; a store reads the blocks as they were computed, however late; no step reads other KV than
that of its own tokens, and every request ends.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm.v1.engine.core import EngineCore

from tests.integrations.played import PlayedEngine
from tests.integrations.random_runs import (
    CHUNK,
    FEW_BLOCKS,
    MODELS,
    MODES,
    Case,
    played,
    tokens,
    use,
    write_config,
)


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
@settings(
    max_examples=2,
    phases=[Phase.reuse, Phase.generate],  # no seed is simpler than another
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 30))
def test_no_token_is_wrong_and_every_request_ends(
    config_dir: Path, model: str, mode: str, seed: int
) -> None:
    Case.of(seed, mode, model).run(config_dir)


@pytest.mark.parametrize("seed", [18997, 52133])
def test_a_hit_that_vllm_refuses_is_computed(config_dir: Path, seed: int) -> None:
    """vLLM counts blocks for requests whose load has failed, and refuses loads beside them."""
    engine, rng = played(config_dir, "full attention", seed, num_blocks=FEW_BLOCKS[1], fail=0.2)
    use(engine, rng, 12, resets_of_running=0.0)


def store(engine: PlayedEngine, prompt: list[int]) -> None:
    """Nothing of the prompt stays in vLLM's own cache."""
    engine.ask([*prompt, 1], 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("model", MODELS)
def test_what_one_engine_stored_another_loads(config_dir: Path, model: str) -> None:
    """A second request with an empty local cache loads every group's parts, and only those."""
    engine, rng = played(config_dir, model, 1)
    prompt = tokens(rng, 10 * CHUNK)
    engine.ask([*prompt, 1], 20)
    engine.run()
    # States are kept where a step of 64 tokens has ended, and at the end of the prompt.
    ends = {4, 8, 10} if any(group.is_state for group in engine.groups) else set(range(11))
    needs_all = all(group.reach.kind == "all" for group in engine.groups)
    needs_all &= len(engine.groups) == len(MODELS[model])
    for asked, longest in ((10 * CHUNK + 1, 10), (10 * CHUNK, 10 if needs_all else 9), (40, 2)):
        hit = max((end for end in ends if end <= longest), default=0)
        assert engine.scheduler.reset_prefix_cache()
        engine.counts.loaded_parts.clear()
        engine.ask([*prompt, 1][:asked], 1)
        engine.run()
        for place, group in enumerate(engine.groups):
            first = min(group.reach.first_token(hit * CHUNK) // CHUNK, hit)
            assert engine.counts.loaded_parts.get(place, 0) == hit - first, (asked, group)


@pytest.mark.parametrize("model", MODELS)
def test_a_canary_compares_what_it_would_have_loaded(config_dir: Path, model: str) -> None:
    """Chunks of which the lookup has found nothing are stored, as ever."""
    engine, rng = played(config_dir, model, 1)
    prompt = tokens(rng, 8 * CHUNK)
    engine.ask([*prompt, 1], 1)
    engine.run()
    loaded = engine.counts.loaded_parts
    for canary in (False, True):
        assert engine.scheduler.reset_prefix_cache()
        engine.agent.canary_every = int(canary)
        engine.counts.stored_parts.clear()
        engine.ask([*prompt, *tokens(rng, 2 * CHUNK), 1], 20)
        engine.run()
        assert engine.counts.stored_parts[0] >= 1
    assert engine.counts.loads == 1
    assert engine.counts.compared_parts == loaded
    assert sum(loaded.values()) > 0


@pytest.mark.parametrize("local_tokens", [CHUNK + 8, 4 * CHUNK])
@pytest.mark.parametrize("model", MODELS)
def test_local_blocks_are_not_loaded(config_dir: Path, model: str, local_tokens: int) -> None:
    """Hits of vLLM's own cache, also inside a chunk, and the cache continues after them."""
    engine, rng = played(config_dir, model, 2)
    prompt = tokens(rng, 6 * CHUNK)
    store(engine, prompt)
    engine.ask(prompt[: local_tokens + 1], 1)
    while engine.asked:  # `run` would empty vLLM's own cache
        engine.step()
    engine.counts.loaded_parts.clear()
    engine.ask([*prompt, 1], 1)
    engine.run()
    assert engine.counts.finished == 3
    assert sum(engine.counts.loaded_parts.values()) > 0
    assert max(engine.counts.loaded_parts.values()) <= 6 - local_tokens // CHUNK


def test_loaded_requests_do_not_wait_for_each_other(config_dir: Path) -> None:
    """vLLM reserves too few blocks for the windows of requests whose loads have ended."""
    engine, rng = played(config_dir, "two windows", 3, num_blocks=88)
    prompt = tokens(rng, 4 * CHUNK)
    store(engine, prompt)
    for _ in range(2):
        engine.ask(prompt + tokens(rng, 56), 1)
    engine.run()
    assert engine.counts.loads >= 1
    assert engine.counts.finished == 3


def test_a_failed_load_lets_those_behind_it_resume(config_dir: Path) -> None:
    """vLLM keeps the request before those that hold blocks in a queue, though it has none."""
    engine, rng = played(config_dir, "two windows", 5, num_blocks=76)
    first, second = tokens(rng, 4 * CHUNK), tokens(rng, 4 * CHUNK)
    engine.ask([*first, 1], 1)
    engine.run()
    of_first = list(engine.agent.parts)
    store(engine, second)
    rng.seed(0)
    engine.ask(first + tokens(rng, 6), 1)
    engine.ask(second + tokens(rng, 6), 1)
    engine.transfers.hold = True  # until both loads have begun
    engine.step()
    assert engine.counts.loads == 2
    for part in of_first:
        del engine.agent.parts[part]
    engine.transfers.hold = False
    engine.run()
    assert (engine.counts.failed_loads, engine.counts.finished) == (1, 4)


# ------------------------------------------------------- resets with steps in flight


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("model", ["full attention", "two windows", "states"])
@pytest.mark.parametrize("running", [False, True])
def test_a_reset_succeeds_while_steps_are_in_flight(
    config_dir: Path, model: str, running: bool, in_flight: int
) -> None:
    """vLLM frees the blocks of a request that has ended when the step in flight has, not before.

    test_asynchronous.py has it with a real engine.
    """
    engine, rng = played(config_dir, model, 1, in_flight=in_flight)
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
def test_a_pause_holds_no_block_for_a_store(config_dir: Path, in_flight: int) -> None:
    """Where vLLM runs in its caller's process, no step follows that would send the store."""
    engine, rng = played(config_dir, "full attention", 1, in_flight=in_flight)
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
