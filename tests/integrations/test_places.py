# SPDX-License-Identifier: Apache-2.0
"""Workers report which agent has mapped their memory; engines have ids of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.integrations.vllm.identity.engine_identity import engine_id as id_of
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.setup import _speaks_for_its_node
from lmcache_redis.integrations.vllm.worker import ConnectorWorker, WorkerReport

HERE, THERE = RankPlace("here", ()), RankPlace("there", ())


def test_a_worker_reports_its_agent_when_that_changes() -> None:
    client: Any = SimpleNamespace(place=None)
    worker = ConnectorWorker(client, 3, Recorder(), reallocates=True)

    def places() -> list[RankPlace | None] | None:
        report = worker.report()
        return None if report is None else [report.places[3]]

    assert places() == [None], "the first report says that it has none yet"
    assert places() is None
    for client.place in (HERE, THERE, None, HERE):
        assert places() == [client.place]
        assert places() is None


def test_reports_of_ranks_are_combined() -> None:
    report = WorkerReport({0: []}, places={0: HERE}).aggregate(WorkerReport({1: [5]}))
    report = report.aggregate(WorkerReport({2: []}, places={2: None}))
    assert report.places == {0: HERE, 2: None}
    assert report.ended == {0: [], 1: [5], 2: []}


def test_data_parallel_cores_have_ids_of_their_own() -> None:
    def engine_id(instance_id: str, index: int) -> str:
        parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_index=index)
        config: Any = SimpleNamespace(
            parallel_config=parallel,
            kv_transfer_config=SimpleNamespace(engine_id="shared"),
            instance_id=instance_id,
        )
        return id_of(config)

    ids = [engine_id(*of) for of in (("a", 0), ("a", 1), ("b", 0), ("b", 1))]
    assert len(set(ids)) == 4
    assert ids == [engine_id(*of) for of in (("a", 0), ("a", 1), ("b", 0), ("b", 1))]


def test_one_worker_of_each_other_node_speaks() -> None:
    """Of its agent. On the first node the scheduler does."""

    def speakers(backend: str, world_size: int, nodes: int = 1) -> list[int]:
        of: dict[str, Any] = {"distributed_executor_backend": backend, "use_ray": backend == "ray"}
        of |= {"world_size": world_size, "nnodes_within_dp": nodes}
        ranks = range(world_size)
        return [n for n in ranks if _speaks_for_its_node(SimpleNamespace(rank=n, **of))]  # type: ignore[arg-type]

    assert speakers("uni", 1) == speakers("mp", 4) == speakers("external_launcher", 2) == []
    assert speakers("mp", 8, nodes=2) == [4]
    assert speakers("mp", 6, nodes=3) == [2, 4]
    assert speakers("ray", 3) == [0, 1, 2]
