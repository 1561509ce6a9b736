# SPDX-License-Identifier: Apache-2.0
"""Errors of the connector: the cache is turned off, and vLLM gets every answer it waits for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm import making
from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.epoch import Epochs
from lmcache_redis.integrations.vllm.worker import Planned, StepMetadata, WorkerReport

BLOCK = 16


class FullAttentionSpec:
    """Known by its name."""

    block_size = BLOCK


class Broken:
    """Raises in every method."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"broken in {name}")

        return fail


def config(directory: Path, **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"endpoint": f"ipc://{directory}/agent.sock", **extra},
            engine_id="engine",
            is_kv_consumer=True,
            is_kv_producer=True,
            kv_load_failure_policy="fail",
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            data_parallel_rank=0,
            distributed_executor_backend="uni",
            use_ray=False,
        ),
        instance_id="instance",
        cache_config=SimpleNamespace(
            block_size=BLOCK, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        model_config=SimpleNamespace(model="some/model"),
        max_in_flight_tokens=512,
    )


def manager_of(num_blocks: int) -> Any:
    """vLLM's, of requests without blocks."""
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK)
    blocks = SimpleNamespace(blocks=([],))
    return SimpleNamespace(block_pool=pool, get_blocks=lambda request_id: blocks)


class MadeScheduler(Scheduler):
    """vLLM's, as far as a connector needs it while it is made."""

    def __init__(self, vllm_config: Any, make: Callable[[], None]) -> None:
        self.vllm_config = vllm_config
        making.while_made(lambda scheduler: make(), self)


def bind(made: LMCacheRedisConnector, manager: Any) -> None:
    MadeScheduler(made._vllm_config, lambda: made.bind_kv_cache_manager(manager))


def connector_of(
    vllm_config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER
) -> LMCacheRedisConnector:
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
    groups = SimpleNamespace(kv_cache_groups=[group], num_blocks=64, kv_cache_tensors=[])
    return LMCacheRedisConnector(vllm_config, role, groups)


def connector(directory: Path, role: KVConnectorRole, **extra: Any) -> LMCacheRedisConnector:
    made = connector_of(config(directory, **extra), role)
    if role is KVConnectorRole.SCHEDULER:
        bind(made, manager_of(64))
    return made


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LMCacheRedisConnector]:
    made = connector(tmp_path, KVConnectorRole.SCHEDULER)
    yield made
    made.shutdown()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[LMCacheRedisConnector]:
    made = connector(tmp_path, KVConnectorRole.WORKER)
    yield made
    made.shutdown()


REQUEST: Any = SimpleNamespace(
    request_id="r", block_hashes=[bytes(32)] * 8, kv_transfer_params=None, num_prompt_tokens=1
)
STEP: Any = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})


def output(report: WorkerReport | None = None) -> Any:
    """The load of `REQUEST` has ended."""
    return SimpleNamespace(
        kv_connector_worker_meta=report, invalid_block_ids=set(), finished_recving={"r"}
    )


def allocate(scheduler: LMCacheRedisConnector, *ids: int, loaded: int) -> None:
    """`REQUEST` gets these blocks, and so many tokens are to be loaded."""
    blocks: Any = SimpleNamespace(get_block_ids=lambda: (list(ids),))
    scheduler.update_state_after_alloc(REQUEST, blocks, loaded)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda c: c.get_num_new_matched_tokens(REQUEST, 0), (0, False)),
        (lambda c: allocate(c, 1, loaded=0), None),
        (lambda c: c.build_connector_meta(STEP), StepMetadata()),
        (lambda c: c.update_connector_output(output()), None),
        (lambda c: c.request_finished(REQUEST, [1]), (False, None)),
        (lambda c: c.reset_cache(), True),
        (lambda c: c.change_epoch(Epochs.weights_may_differ, "a test"), None),
    ],
)
def test_an_error_in_the_scheduler_turns_the_cache_off(
    scheduler: LMCacheRedisConnector,
    caplog: pytest.LogCaptureFixture,
    ask: Callable[[Any], Any],
    answer: Any,
) -> None:
    scheduler._scheduler = Broken()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        assert ask(scheduler) == answer
        assert ask(scheduler) in (answer, None)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert not scheduler.has_pending_push_work()


def step_of(worker: LMCacheRedisConnector, metadata: StepMetadata) -> Any:
    """One step of vLLM's worker."""
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)  # type: ignore[arg-type]
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    invalid = worker.get_block_ids_with_load_errors()
    report = worker.build_connector_worker_meta()
    worker.get_kv_connector_stats()
    worker.clear_connector_metadata()
    return SimpleNamespace(results=results, invalid=invalid, report=report)


def test_a_load_promised_by_a_broken_scheduler_fails(
    scheduler: LMCacheRedisConnector, worker: LMCacheRedisConnector
) -> None:
    """vLLM would wait for it for ever.

    All blocks are named that it would have filled, behind the local ones: vLLM before 0.30
    recomputes from the first that is.
    """
    scheduler._scheduler = Broken()  # type: ignore[assignment]
    allocate(scheduler, 1, 2, 3, 4, loaded=3 * BLOCK)
    metadata = scheduler.build_connector_meta(STEP)
    assert isinstance(metadata, StepMetadata)
    assert metadata.lost_loads == {"r": [2, 3, 4]}
    step = step_of(worker, metadata)
    assert step.results.finished_recving == step.results.failed_recving == {"r"}
    assert step.invalid == set()
    # The worker still works.
    assert worker._worker is not None


def test_older_vllm_is_told_of_blocks(worker: LMCacheRedisConnector) -> None:
    worker.bind_connector_metadata(StepMetadata(lost_loads={"r": [3, 4]}))
    worker.start_load_kv(None)  # type: ignore[arg-type]
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == {3, 4}
    assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize("breaks", ["step_begins", "begin_loads", "ended_loads", "report"])
def test_an_error_in_a_worker_turns_the_cache_off(
    scheduler: LMCacheRedisConnector,
    worker: LMCacheRedisConnector,
    monkeypatch: pytest.MonkeyPatch,
    breaks: str,
) -> None:
    monkeypatch.setattr(worker._worker, breaks, getattr(Broken(), breaks))
    assert scheduler._references is not None
    pool = scheduler._references.pool
    free = pool.get_num_free_blocks()
    transfer_id = scheduler._references.take([3, 4])
    op = TransferOp(block_ids=[2, 3, 4], hashes=[bytes(32)], skip_blocks=1)
    steps = [StepMetadata(loads=[Planned(transfer_id, "r", (op,))]), StepMetadata()]
    results = [step_of(worker, each).results for each in steps]
    assert [r.finished_recving for r in results].count({"r"}) == 1
    assert [r.failed_recving for r in results].count({"r"}) == 1

    report = step_of(worker, StepMetadata()).report
    # There never was an agent, so none touches a block.
    assert report == WorkerReport({}, broken={0: True})
    scheduler.update_connector_output(output(report))
    assert scheduler._scheduler is None
    assert pool.get_num_free_blocks() == free


def test_what_was_not_sent_holds_no_block_when_the_cache_is_off(
    scheduler: LMCacheRedisConnector,
) -> None:
    references = scheduler._references
    assert references is not None
    free = references.pool.get_num_free_blocks()
    sent = references.take([3, 4])
    references.sent([sent])
    references.take([5, 6], for_store=True)
    references.take([7])
    scheduler._scheduler = Broken()  # type: ignore[assignment]
    scheduler.build_connector_meta(STEP)
    assert references.pool.get_num_free_blocks() == free - 2
    references.ended({0: [sent]})
    assert references.pool.get_num_free_blocks() == free


def test_a_wrong_setting_keeps_the_cache_off_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        made = connector(tmp_path, KVConnectorRole.SCHEDULER, endpiont="ipc:///nowhere")
    assert "endpiont" in caplog.text
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)


def test_a_connector_knows_that_it_is_beside_others(tmp_path: Path) -> None:
    """Its scheduler has another config, and has failed loads computed too."""
    parent, alone = config(tmp_path), config(tmp_path)
    child = copy.copy(parent)  # as a MultiConnector makes it
    child.kv_transfer_config = config(tmp_path).kv_transfer_config
    for engines, own, is_beside in ((parent, child, True), (alone, alone, False)):
        made: list[LMCacheRedisConnector] = []
        MadeScheduler(engines, lambda: made.append(connector_of(own)))  # noqa: B023
        assert made[0]._set_up.beside_others == is_beside
        assert own.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert engines.kv_transfer_config.kv_load_failure_policy == "recompute"
        made[0].shutdown()


@pytest.mark.parametrize("bind", ["bind_kv_cache_manager", "bind_gpu_block_pool"])
def test_the_cache_of_an_engine_that_was_not_seen_stays_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bind: str
) -> None:
    made = connector_of(config(tmp_path))
    getattr(made, bind)(manager_of(64))
    assert "the cache stays off: vLLM was not seen making this engine: VLLM_PLUGINS" in caplog.text
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    made.shutdown()


def test_settings_reach_the_link(tmp_path: Path) -> None:
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        made = connector(tmp_path, role, agent_dead_after_s=3.5)
        assert made._adapter is not None
        assert made._adapter.link._patience.seconds == 3.5
        made.shutdown()


def test_a_sleeping_engine_registers_when_it_wakes(
    worker: LMCacheRedisConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    caches: Any = {"layer": object()}
    monkeypatch.setattr(worker._adapter, "unregister", lambda _: calls.append("unregister") or True)
    monkeypatch.setattr(worker, "register_kv_caches", calls.append)
    worker._kv_caches = caches
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    assert calls == ["unregister", caches]
