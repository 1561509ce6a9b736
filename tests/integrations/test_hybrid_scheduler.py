"""Models with several kinds of KV cache in vLLM's own scheduler: every token read is right.

`played.py` says what is checked in each step: a load writes exactly the blocks that are neither
null nor local, names only parts that the lookup has pinned, and touches no block of another
request; a store reads the blocks as they were computed, however late; no step reads other KV than
that of its own tokens, and every request ends.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from tests.integrations.played import PlayedEngine
from tests.integrations.test_groups import full, has_field, local, replayed, ring, state, window

CHUNK = 16
MODELS: dict[str, list[Any]] = {
    "full attention": [full(4)],
    "a window": [window(10, block=4)],
    "a window shorter than a chunk": [window(10, block=4), full(4)],
    "a window longer than a chunk": [full(4), window(40, block=4)],
    "two windows": [window(10, block=4), window(33, block=4), full(4)],
    "tokens that a window keeps longer": [full(4), window(10, 3, block=4)],
    "attention chunks": [full(4), local(32, block=4)],
    "attention chunks shorter than a chunk": [full(4), local(8, block=4)],
    "states": [state(8), state(8), full(8)],
    "states and a window": [state(8), full(8), window(12, block=8)],
    "states of larger blocks": [state(16), full(4)],
    "a window of smaller blocks": [window(10, block=4), full(8)],
    "a window of larger blocks": [full(4), window(20, block=8)],
    # Groups that vLLM's own prefix cache leaves out.
    "a buffer of one request": [ring(8), full(4)],
    "a buffer between others": [window(10, block=4), ring(8), state(8), full(8)],
}
if has_field(SlidingWindowMLASpec, "bounded_replay"):  # vLLM 0.31 or newer
    MODELS |= {
        "a window that is replayed": [full(4), replayed(12, block=4), full(16)],
        "a buffer and a replayed window": [replayed(12, block=4), ring(8), full(4)],
    }
# The longest request: 171 tokens and 30 of its answer. Windows also hold the tokens of a step. vLLM
# admits a preempted request only if all of it fits.
FEW_BLOCKS = {1: 56, 2: 80, 3: 98, 4: 108}


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's settings. The scheduler looks at little more than the length of its context."""
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("config")
    LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=100,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50) for _ in range(count)]


def use(
    engine: PlayedEngine, rng: random.Random, rounds: int, *, resets_of_running: float = 0.3
) -> None:
    """Requests that begin like others, aborts, evictions, and resets of vLLM's own cache."""
    common = [tokens(rng, 150) for _ in range(2)]
    for _ in range(rounds):
        for _ in range(rng.randrange(4)):
            prompt = rng.choice(common)[: rng.randrange(1, 150)]
            engine.ask(prompt + tokens(rng, rng.randrange(20)), rng.randrange(1, 30))
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.1 and engine.asked:
            engine.abort(rng.choice(engine.asked))
        if rng.random() < 0.1:
            engine.evict(0.3)
        if rng.random() < 0.3:
            # With running requests, nobody may have a block.
            running = bool(resets_of_running) and rng.random() < resets_of_running
            engine.scheduler.reset_prefix_cache(reset_running_requests=running)
    engine.run()


@pytest.mark.parametrize("model", MODELS)
@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1 << 30),
    fails=st.booleans(),
    few=st.booleans(),
    canaries=st.sampled_from(["none", "some", "all"]),
)
def test_no_token_is_wrong_and_every_request_ends(
    config_dir: Path, model: str, seed: int, fails: bool, few: bool, canaries: str
) -> None:
    rng = random.Random(seed)
    engine = PlayedEngine(
        config_dir,
        MODELS[model],
        chunk_tokens=CHUNK,
        num_blocks=FEW_BLOCKS[len(MODELS[model])] if few else 300,
        rng=rng,
        fail=0.2 if fails else 0.0,
    )
    engine.agent.canary_every = 0 if canaries == "none" else 3
    engine.agent.compare_only = canaries == "all"
    use(engine, rng, 12)
    assert canaries != "all" or engine.counts.loads == 0


@pytest.mark.parametrize("seed", [18997, 52133])
def test_a_hit_that_vllm_refuses_is_computed(config_dir: Path, seed: int) -> None:
    """vLLM counts blocks for requests whose load has failed, and refuses loads beside them."""
    rng = random.Random(seed)
    specs = MODELS["full attention"]
    engine = PlayedEngine(
        config_dir, specs, chunk_tokens=CHUNK, num_blocks=FEW_BLOCKS[1], rng=rng, fail=0.2
    )
    use(engine, rng, 12, resets_of_running=0.0)


@pytest.mark.parametrize("model", MODELS)
def test_what_one_engine_stored_another_loads(config_dir: Path, model: str) -> None:
    """A second request with an empty local cache loads every group's parts, and only those."""
    rng = random.Random(1)
    specs = MODELS[model]
    engine = PlayedEngine(config_dir, specs, chunk_tokens=CHUNK, num_blocks=300, rng=rng)
    prompt = tokens(rng, 10 * CHUNK)
    engine.ask([*prompt, 1], 20)
    engine.run()
    # States are kept where a step of 64 tokens has ended, and at the end of the prompt.
    ends = {4, 8, 10} if any(group.is_state for group in engine.groups) else set(range(11))
    needs_all = all(group.reach.kind == "all" for group in engine.groups)
    needs_all &= len(engine.groups) == len(specs)
    for asked, longest in ((10 * CHUNK + 1, 10), (10 * CHUNK, 10 if needs_all else 9), (40, 2)):
        hit = max((end for end in ends if end <= longest), default=0)
        assert engine.scheduler.reset_prefix_cache()
        engine.counts.loaded_parts.clear()
        engine.ask([*prompt, 1][:asked], 1)
        engine.run()
        for place, group in enumerate(engine.groups):
            end = hit * CHUNK
            first = min(group.reach.first_token(end) // CHUNK, hit)
            parts = hit - first
            assert engine.counts.loaded_parts.get(place, 0) == parts, (asked, group)


@pytest.mark.parametrize("model", MODELS)
def test_a_canary_compares_what_it_would_have_loaded(config_dir: Path, model: str) -> None:
    """Chunks of which the lookup has found nothing are stored, as ever."""
    rng = random.Random(1)
    specs = MODELS[model]
    engine = PlayedEngine(config_dir, specs, chunk_tokens=CHUNK, num_blocks=300, rng=rng)
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


@pytest.mark.parametrize("local_tokens", [0, 8, CHUNK, CHUNK + 8, 3 * CHUNK, 4 * CHUNK])
@pytest.mark.parametrize("model", MODELS)
def test_local_blocks_are_not_loaded(config_dir: Path, model: str, local_tokens: int) -> None:
    """Hits of vLLM's own cache, also inside a chunk, and the cache continues after them."""
    rng = random.Random(2)
    engine = PlayedEngine(config_dir, MODELS[model], chunk_tokens=CHUNK, num_blocks=300, rng=rng)
    prompt = tokens(rng, 6 * CHUNK)
    engine.ask([*prompt, 1], 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    if local_tokens:
        engine.ask(prompt[: local_tokens + 1], 1)
        engine.run()
    engine.ask([*prompt, 1], 1)
    engine.run()
    assert engine.counts.finished == 2 + bool(local_tokens)
    assert engine.counts.loads >= 1


def test_loaded_requests_do_not_wait_for_each_other(config_dir: Path) -> None:
    """vLLM reserves too few blocks for the windows of requests whose loads have ended."""
    rng = random.Random(3)
    specs = MODELS["two windows"]
    engine = PlayedEngine(config_dir, specs, chunk_tokens=CHUNK, num_blocks=88, rng=rng)
    prompt = tokens(rng, 4 * CHUNK)
    engine.ask([*prompt, 1], 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for _ in range(2):
        engine.ask(prompt + tokens(rng, 56), 1)
    engine.run()
    assert engine.counts.loads >= 1
    assert engine.counts.finished == 3


def test_a_failed_load_lets_those_behind_it_resume(config_dir: Path) -> None:
    """vLLM keeps the request before those that hold blocks in a queue, though it has none."""
    rng = random.Random(5)
    specs = MODELS["two windows"]
    engine = PlayedEngine(config_dir, specs, chunk_tokens=CHUNK, num_blocks=76, rng=rng)
    first, second = tokens(rng, 4 * CHUNK), tokens(rng, 4 * CHUNK)
    engine.ask([*first, 1], 1)
    engine.run()
    of_first = list(engine.agent.parts)
    engine.ask([*second, 1], 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    rng.seed(0)
    engine.ask(first + tokens(rng, 6), 1)
    engine.ask(second + tokens(rng, 6), 1)
    engine.hold = True  # until both loads have begun
    engine.step()
    assert engine.counts.loads == 2
    for part in of_first:
        del engine.agent.parts[part]
    engine.hold = False
    engine.run()
    assert (engine.counts.failed_loads, engine.counts.finished) == (1, 4)
