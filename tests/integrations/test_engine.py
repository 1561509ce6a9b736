# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine core over a played model: pauses, resets, updates of weights, snapshots.

The core's methods and the scheduler are vLLM's own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor as VllmExecutor

from lmcache_redis.integrations.vllm import engine as engines
from lmcache_redis.integrations.vllm.engine import Engine
from lmcache_redis.integrations.vllm.epoch import Epochs, named_epoch, version_epoch
from lmcache_redis.integrations.vllm.parameters import parameters_digest
from tests.integrations.played import PlayedEngine
from tests.integrations.test_groups import full, state, window
from tests.integrations.test_hybrid_scheduler import CHUNK, config_dir, tokens

__all__ = ["config_dir"]

PROMPT = [*tokens(random.Random(2), 4 * CHUNK), 1]


class Executor:
    """The workers of a played engine: their parameters, and the calls that they get."""

    def __init__(self) -> None:
        self.digest = b"first"
        self.calls: list[Any] = []
        self.broken = False
        self.sleeping_tags: set[str] = set()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    @is_sleeping.setter
    def is_sleeping(self, value: bool) -> None:
        """vLLM before 0.31 sets it beside the tags."""

    def sleep(self, level: int = 1) -> None:
        VllmExecutor.sleep(self, level)  # type: ignore[arg-type]

    def wake_up(self, tags: list[str] | None = None) -> None:
        VllmExecutor.wake_up(self, tags)  # type: ignore[arg-type]

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        if method is parameters_digest:
            assert "weights" not in self.sleeping_tags, "the weights are unmapped"
            return [(self.digest, self.digest)]
        self.calls.append((method, *args))
        if self.broken:
            raise RuntimeError("a worker failed")
        return [None]

    def get_kv_connector_handshake_metadata(self) -> None: ...

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


class Core(EngineCore):
    """vLLM's, made from a scheduler instead of a model."""

    def __init__(self, played: PlayedEngine, run: str | None = None) -> None:
        self.played = played
        self.scheduler = played.scheduler
        self.model_executor = self.executor = Executor()  # type: ignore[assignment]
        self.mm_receiver_cache = None
        self.vllm_config = played.scheduler.vllm_config
        inner = played.connector._scheduler
        assert inner is not None
        engine = played.connector._engine = Engine(self.executor, played.scheduler)
        self.epochs = inner._names.epochs = Epochs(None, run, engine.parameters)
        # No transfer ends until the test says so.
        self._random = played._rng.random
        self.let_transfers_end(False)

    def let_transfers_end(self, end: bool) -> None:
        self.played._rng.random = self._random if end else lambda: 0.9  # type: ignore[method-assign]

    def store(self) -> None:
        """Asks for the prompt and steps until its answer is there; a store is in flight."""
        self.played.ask(PROMPT, 2)
        while self.played.asked:
            self.played.step()
        assert self.played.transfers._stores

    def load(self, *, ends: bool, beside: Sequence[int] = ()) -> str:
        """A request loads what another has stored. beside: a prompt that runs already."""
        self.store()
        self.finish()
        assert self.reset_prefix_cache()
        self.let_transfers_end(ends)
        if beside:
            self.played.ask(beside, 20)
            self.played.step()
        request_id = self.played.ask(PROMPT, 2)
        self.played.step()
        assert self.played.counts.loads == 1
        while ends and self.played.transfers._loads:
            self.played.step()
        return request_id

    def finish(self) -> None:
        """All requests end, and all transfers; the played engine checks every block."""
        self.let_transfers_end(True)
        self.played.run()


class Ended(Exception):
    """The core has begun to shut down."""


MakeCore = Callable[..., Core]


@pytest.fixture
def make_core(config_dir: Path) -> MakeCore:
    def make(*specs: Any, run: str | None = None, **options: Any) -> Core:
        options = {"chunk_tokens": CHUNK, "num_blocks": 300, **options}
        rng = random.Random(1)
        return Core(PlayedEngine(config_dir, specs or [full(4)], rng=rng, **options), run)

    return make


SPECS = [[full(4)], [full(4), window(10, block=4)], [state(8), full(8)]]


@pytest.mark.parametrize("specs", SPECS)
def test_a_reset_does_not_wait_for_stores(make_core: MakeCore, specs: list[Any]) -> None:
    core = make_core(*specs)
    core.store()
    held = core.played.free_blocks - core.played.pool.get_num_free_blocks()
    assert held > 0
    assert core.reset_prefix_cache()
    # The agent may still be reading: the blocks stay held, under no name.
    assert core.played.free_blocks - core.played.pool.get_num_free_blocks() == held
    assert len(core.played.pool.cached_block_hash_to_block) == 0
    core.finish()
    assert core.played.counts.stored_parts


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("state", ["loading", "loaded", "aborted"])
def test_a_reset_does_not_wait_for_loads(make_core: MakeCore, specs: list[Any], state: str) -> None:
    """Requests that load, or have loaded, start over: vLLM alone would hold no block."""
    core = make_core(*specs)
    request_id = core.load(ends=state == "loaded")
    if state == "aborted":
        core.played.abort(request_id)
    assert core.reset_prefix_cache()
    core.finish()
    assert core.played.counts.finished == (1 if state == "aborted" else 2)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_reset_takes_blocks_of_loads_when_the_cache_is_off(
    make_core: MakeCore, loaded: bool
) -> None:
    core = make_core()
    core.load(ends=loaded)
    core.played.connector.turn_off()
    assert core.reset_prefix_cache()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_pause_that_keeps_requests_ends(make_core: MakeCore, loaded: bool) -> None:
    """A request that is loaded and waits, beside one that runs."""
    core = make_core(full(4))
    core.load(ends=loaded, beside=tokens(random.Random(3), 20))
    assert core.pause_scheduler("keep") is None
    assert len(core.played.pool.cached_block_hash_to_block) == 0
    core.resume_scheduler()
    core.finish()
    assert core.played.counts.finished == 3


def test_a_pause_keeps_the_epoch(make_core: MakeCore) -> None:
    core = make_core()
    agent = core.played.agent
    core.store()
    core.pause_scheduler("abort")
    core.resume_scheduler()
    assert core.epochs.current == b""
    core.executor.digest = b"second"  # a trainer writes weights while the engine is paused
    core.pause_scheduler("abort")
    assert core.epochs.is_own
    assert agent.cleared == []


def test_a_clear_hides_what_others_share(make_core: MakeCore) -> None:
    """Only chunks of an epoch that nobody else has are removed."""
    core = make_core()
    assert core.reset_prefix_cache(reset_connector=True)
    own = core.epochs.current
    assert core.epochs.is_own
    assert core.played.agent.cleared == []
    core.store()
    assert core.reset_prefix_cache(reset_connector=True)
    assert core.played.agent.cleared == [own]
    core.collective_rpc(engines.WEIGHTS_ID_RPC, args=("step-1",))
    assert core.reset_prefix_cache(reset_connector=True)
    assert core.played.agent.cleared == [own]


def test_weights_written_past_every_call_are_seen(make_core: MakeCore) -> None:
    """``load_weights`` and then ``reset_prefix_cache()``, as trainers in the same process do."""
    core = make_core()
    core.store()
    core.finish()
    core.executor.digest = b"second"
    for loads in (0, 1):
        assert core.reset_prefix_cache()
        core.played.ask(PROMPT, 2)
        core.finish()
        assert core.played.counts.loads == loads


@pytest.mark.parametrize(
    "method",
    [
        "checkpoint_prepare", "checkpoint_restore", "synchronize_device", "list_loras",
        "release_late_interaction_query_cache",
    ],
)  # fmt: skip
def test_calls_that_leave_the_weights_alone(make_core: MakeCore, method: str) -> None:
    core = make_core()
    core.collective_rpc(method)
    assert core.epochs.current == b""


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("method", ["start_weight_update", "update_weights", "reset_weights", len])
def test_any_other_call_is_an_update(make_core: MakeCore, method: Any, broken: bool) -> None:
    core = make_core()
    core.executor.broken = broken
    try:
        core.collective_rpc(method)
    except RuntimeError:
        assert broken
    assert core.epochs.is_own


@pytest.mark.parametrize("method", ["reload_weights", "finish_weight_update"])
def test_an_update_to_the_same_weights_changes_nothing(make_core: MakeCore, method: str) -> None:
    core = make_core()
    core.collective_rpc(method)
    assert core.epochs.current == b""
    core.executor.digest = b"second"
    core.collective_rpc(method)
    assert core.epochs.is_own
    core.executor.digest = b"first"
    core.collective_rpc(method)
    assert core.epochs.current == b""


def test_a_failed_reload_is_doubted_until_the_weights_are_read(
    make_core: MakeCore,
) -> None:
    core = make_core()
    core.executor.broken = True
    with pytest.raises(RuntimeError):
        core.collective_rpc("reload_weights")
    assert core.epochs.is_own
    assert core.reset_prefix_cache()
    assert core.epochs.current == b""


def test_a_sleep_without_weights_ends_the_epoch(make_core: MakeCore) -> None:
    """vLLM's flow for trainers and for snapshots: sleep at level 2, reload, wake."""
    core = make_core()
    core.sleep(1)
    assert core.epochs.current == b""
    core.wake_up()
    core.sleep(2)
    assert core.epochs.is_own
    core.executor.digest = b"garbage"
    core.wake_up(["weights"])
    assert core.epochs.is_own
    core.executor.digest = b"first"
    core.collective_rpc("reload_weights")  # the KV cache still sleeps
    assert core.epochs.current == b""
    core.wake_up(["kv_cache"])
    core.sleep(2)
    core.executor.digest = b"second"  # a trainer writes past every call
    core.wake_up()
    assert core.epochs.is_own


def test_own_epochs_end_when_weights_change(make_core: MakeCore) -> None:
    core = make_core()
    owns = []
    for step in range(4):
        core.executor.digest = b"step %d" % step
        core.collective_rpc("update_weights")
        assert core.reset_prefix_cache()
        core.store()
        core.finish()
        core.let_transfers_end(False)
        owns.append(core.epochs.current)
        assert core.played.agent.cleared == owns[:-1]


def test_methods_that_others_have_wrapped_are_still_watched(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decorator of vLLM's own is not taken for ours, and ours is found behind another."""

    def decorated(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(core: Any, *args: Any, **kwargs: Any) -> Any:
            return method(core, *args, **kwargs)

        return wrapper

    def own(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        return core.model_executor.collective_rpc(method, *args, **kwargs)

    monkeypatch.setattr(EngineCore, "collective_rpc", decorated(own))
    core = make_core()
    core.collective_rpc("update_weights")
    assert core.epochs.is_own
    twice = decorated(EngineCore.collective_rpc)
    monkeypatch.setattr(EngineCore, "collective_rpc", twice)
    make_core()
    assert EngineCore.collective_rpc is twice


def test_versions_are_shared_in_a_named_run_only(make_core: MakeCore) -> None:
    core, named = make_core(), make_core(run="run-7")
    core.set_weight_version("100")
    assert core.get_weight_version() == "100"
    assert core.epochs.current == b""  # the weights are the same
    core.executor.digest = b"second"
    core.set_weight_version("101")
    assert core.epochs.is_own
    named.set_weight_version("100")
    assert named.epochs.current == version_epoch("run-7", "100")
    core.collective_rpc(engines.WEIGHTS_ID_RPC, args=("100",))
    assert core.epochs.current == named_epoch("100")


@pytest.mark.parametrize("weights_id", ["", "x" * 257, None, 7])
def test_an_id_is_a_short_text(make_core: MakeCore, weights_id: Any) -> None:
    core = make_core()
    with pytest.raises(ValueError, match="1 to 256 characters"):
        core.collective_rpc(engines.WEIGHTS_ID_RPC, args=(weights_id,))
    assert core.epochs.current == b""


def test_a_restored_engine_has_a_name_of_its_own(make_core: MakeCore) -> None:
    core = make_core()
    names: list[str] = []
    core.played.connector.renamed = names.append  # type: ignore[method-assign]
    core.collective_rpc("checkpoint_restore")
    core.collective_rpc("checkpoint_restore")
    told = [call for call in core.executor.calls if call[0] is engines.rename]
    assert [suffix for _, suffix in told] == names
    assert len(set(names)) == 2


def test_a_sleeping_engine_is_not_read(
    make_core: MakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU that would be an error that ends the engine. What it wakes with is not known."""
    core = make_core()
    core.executor.sleeping_tags = {"weights", "kv_cache"}
    assert core.reset_prefix_cache()
    assert core.epochs.is_own
    assert "check_weights" not in caplog.text  # nor did it try
    core.model_executor.wake_up()
    assert core.epochs.current == b""  # it has woken with the same weights


def test_an_engine_whose_parameters_cannot_be_read(
    make_core: MakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core()
    core.epochs._read = Engine(None, core.played.scheduler).parameters  # it was not seen
    assert core.reset_prefix_cache()
    assert core.epochs.is_own
    assert "VLLM_PLUGINS must not leave out lmcache_redis" in caplog.text
    assert "check_weights" in caplog.text


def test_an_epoch_ends_before_the_workers_do(make_core: MakeCore) -> None:
    """vLLM kills a core whose workers take 5 s to end. Another engine of its process goes on."""
    ends, goes_on = make_core(), make_core()
    for core in (ends, goes_on):
        core.epochs.is_used = True

    def clear_backend() -> None:
        raise Ended

    ends.structured_output_manager = SimpleNamespace(clear_backend=clear_backend)  # type: ignore[assignment]
    with pytest.raises(Ended):
        ends.shutdown()
    assert ends.epochs.is_own
    assert not goes_on.epochs.is_own
