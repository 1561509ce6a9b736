# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced in a running vLLM: KV that the old ones computed is never used again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines import PATCH_VARIABLE, ForkedEngine, empty
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts, make_model
from tests.integrations.router import Router
from tests.integrations.test_vllm import CHUNK, check_events, ready, start, wait_for_a_hit
from tests.scraping import samples_in
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

TWO_RANKS = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


class Weights:
    """One model whose files hold the first weights or the second, and what each answers."""

    def __init__(self, directory: Path, question: list[int]) -> None:
        self.question = question
        self._versions = [make_model(directory / f"v{n}" / "model", seed=n) for n in (1, 2)]
        self.model = directory / "served" / "model"
        shutil.copytree(self._versions[0], self.model)
        with start(self.model, None, directory / "plain.log") as plain:
            self.expected = [plain.generate([question], 8).outputs[0]]
            self.reload(plain, 1)
            self.expected.append(plain.generate([question], 8).outputs[0])
        assert self.expected[0] != self.expected[1]

    def put(self, version: int) -> None:
        for file in self._versions[version].glob("*.safetensors"):
            shutil.copyfile(file, self.model / file.name)

    def reload(self, engine: ForkedEngine, version: int, *, connector: bool = False) -> None:
        """As RL does it: new weights in place, and then vLLM's own cache is reset."""
        self.put(version)
        engine.rpc("reload_weights")
        assert engine.reset_prefix_cache(connector=connector)

    def ask(self, engine: ForkedEngine, version: int) -> int:
        """Asserts that the answer is the version's; returns how many tokens were hits."""
        empty(engine)
        answer = engine.generate([self.question], 8)
        assert answer.outputs[0] == self.expected[version]
        return int(answer.details["cached_tokens"][0])

    def wait_for_a_hit(self, engine: ForkedEngine, version: int) -> None:
        """A lookup that overtakes the store before it is a miss."""
        wait_until(lambda: self.ask(engine, version) == 3 * CHUNK, what="a hit")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"), Prompts(11).tokens(3 * CHUNK + 10))


def test_weights_are_reloaded_in_a_running_engine(
    weights: Weights, agent: AgentServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    weights.put(0)
    with start(weights.model, agent, tmp_path / "one.log") as one:
        assert weights.ask(one, 0) == 0
        weights.wait_for_a_hit(one, 0)
        agent.wait_idle()

        weights.reload(one, 1)  # its connector is not told by vLLM
        assert weights.ask(one, 1) == 0
        weights.wait_for_a_hit(one, 1)

        weights.reload(one, 0, connector=True)
        assert weights.ask(one, 0) == 0
        redis_server.stop()  # neither an update nor a clear waits for Redis
        weights.reload(one, 1, connector=True)
        assert weights.ask(one, 1) == 0
        redis_server.cont()
        agent.kill()
        weights.reload(one, 0, connector=True)
        assert weights.ask(one, 0) == 0
        agent.start()
        wait_until(lambda: ready(agent), what="the engine at the new agent")

        # All engines that were updated to an id share its chunks.
        weights.reload(one, 1)
        one.rpc("lmcache_redis_weights_id", "step-2")
        weights.ask(one, 1)
        weights.ask(one, 1)
        agent.wait_idle()
    weights.put(0)
    with start(weights.model, agent, tmp_path / "two.log") as two:
        # It starts from the old weights, and hits what the old weights computed.
        assert weights.ask(two, 0) == 3 * CHUNK
        weights.reload(two, 1)
        two.rpc("lmcache_redis_weights_id", "step-2")
        assert weights.ask(two, 1) == 3 * CHUNK

        redis_server.kill()
        weights.reload(two, 0, connector=True)
        assert weights.ask(two, 0) == 0


@pytest.mark.long
def test_the_same_weights_again_and_nothing_left_of_others(
    weights: Weights, agent: AgentServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Pauses, snapshots, weights written past every call, and many updates of one engine."""
    weights.put(0)
    trained = tmp_path / "trained"
    patch = {
        PATCH_VARIABLE: str(Path(__file__).with_name("writer.py")),
        "TRAINED": str(trained),
    }
    with start(weights.model, agent, tmp_path / "one.log", env=patch) as one:
        assert weights.ask(one, 0) == 0
        one.step("pause")  # also while its store is in flight
        assert weights.ask(one, 0) == 3 * CHUNK
        assert agent.counter("clears") == 0
        agent.wait_idle()
        of_one_epoch = keys_in(redis_server)

        names = [each["engine_id"] for each in agent.status()["engines"]]
        one.rpc("checkpoint_prepare")
        one.rpc("checkpoint_restore")

        def is_renamed() -> bool:
            now = [each["engine_id"] for each in agent.status()["engines"]]
            return ready(agent) and now != names

        wait_until(is_renamed, what="the engine under its new name")
        wait_for_a_hit(one, Prompts(12).tokens(CHUNK + 10))
        assert weights.ask(one, 0) == 3 * CHUNK
        agent.wait_idle()
        shared = keys_in(redis_server)
        both = shared + of_one_epoch

        weights.put(1)
        trained.touch()
        wait_until(lambda: not trained.exists(), what="weights that a trainer writes")
        assert weights.ask(one, 1) == 0
        weights.wait_for_a_hit(one, 1)
        weights.put(0)
        trained.touch()
        wait_until(lambda: not trained.exists(), what="the first weights again")
        assert weights.ask(one, 0) == 3 * CHUNK
        one.step("pause")
        assert weights.ask(one, 0) == 3 * CHUNK
        one.rpc("reload_weights")
        assert weights.ask(one, 0) == 3 * CHUNK
        one.step("sleep")  # without weights, which are loaded again: snapshots do so
        assert weights.ask(one, 0) == 3 * CHUNK

        for _ in range(3):
            weights.reload(one, 1)
            assert weights.ask(one, 1) == 0
            weights.wait_for_a_hit(one, 1)
            weights.reload(one, 1)  # its own epoch goes on
            assert weights.ask(one, 1) == 3 * CHUNK
            agent.wait_idle()
            wait_until(lambda: keys_in(redis_server) == both, what="one epoch beside it")
            weights.reload(one, 0)
            assert weights.ask(one, 0) == 3 * CHUNK
            wait_until(lambda: keys_in(redis_server) == shared, what="what others share")
        weights.reload(one, 1)
        assert weights.ask(one, 1) == 0
        agent.wait_idle()
    wait_until(lambda: keys_in(redis_server) == shared, what="nothing of an engine that has ended")
    weights.put(0)
    with start(weights.model, agent, tmp_path / "two.log") as two:
        assert weights.ask(two, 0) == 3 * CHUNK


def keys_in(server: RedisServer) -> int:
    with server.client() as client:
        return len(stripe_keys(client))


def test_two_ranks_each_load_their_shard_and_begin_new_epochs(
    weights: Weights, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    weights.put(0)
    questions = [prompts.tokens(3 * CHUNK + 10) for _ in range(3)]
    router = Router(tmp_path)
    options = {**TWO_RANKS, **router.options}
    with router, start(weights.model, agent, tmp_path / "engine.log", **options) as engine:
        cold = engine.generate(questions, 8)
        agent.wait_idle()
        check_events(engine, router, questions[0], 3 * CHUNK)
        assert len(agent.status()["engines"]) == 2
        agent.restart()
        wait_for_a_hit(engine, prompts.tokens(CHUNK + 1))
        retrieved = agent.counter("retrieved_chunks")
        warm = engine.generate(questions, 8)
        assert warm.outputs == cold.outputs
        assert warm.details["cached_tokens"] == [3 * CHUNK] * 3
        assert agent.counter("retrieved_chunks") - retrieved == 2 * 3 * 3
        samples = samples_in(engine.metrics())
        loaded = "lmcache_redis_vllm_loaded_chunks_total"
        by_worker = [value for (name, _), value in samples.items() if name == loaded]
        assert by_worker[0] == by_worker[1] >= 3 * 3

        assert weights.ask(engine, 0) == 0
        weights.wait_for_a_hit(engine, 0)
        weights.reload(engine, 1)
        assert weights.ask(engine, 1) == 0
        weights.wait_for_a_hit(engine, 1)
