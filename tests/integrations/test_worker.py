# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker: a load or a store of several groups is one transfer for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch

from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.setup import _speaks_for_its_node
from lmcache_redis.integrations.vllm.worker import (
    ConnectorWorker,
    Planned,
    StepMetadata,
    WorkerReport,
)
from tests.integrations.layers import registration
from tests.integrations.test_groups import full, replayed, ring

HERE, THERE = RankPlace("here", ()), RankPlace("there", ())
OPS = tuple(
    TransferOp(block_ids=[10 * group, 10 * group + 1], hashes=[b"hash"], group=group)
    for group in range(3)
)


@dataclass
class Transfer:
    """One operation at the agent."""

    op: TransferOp
    over: bool = False
    given_up: bool = False
    failed: bool = False
    chunks: int = 1
    compared: bool = False
    call: Any = field(default_factory=lambda: SimpleNamespace(done=True))
    result: Any = field(default_factory=lambda: SimpleNamespace(stored=1, dropped=0))

    @property
    def failed_chunks(self) -> list[int]:
        return [0] if self.failed else []

    @property
    def failed_blocks(self) -> set[int]:
        return set(self.op.block_ids) if self.failed else set()


class Client:
    """Begins transfers, which the test ends."""

    place = None

    def __init__(self) -> None:
        self.begun: list[Transfer] = []

    def signal(self) -> int | None:
        return None

    def begin_retrieves(
        self, request_ids: Sequence[str], ops: Sequence[TransferOp], after: int | None
    ) -> list[Transfer]:
        assert len(request_ids) == len(ops)
        self.begun += (begun := [Transfer(op) for op in ops])
        return begun

    def begin_stores(
        self,
        request_ids: Sequence[str],
        ops: Sequence[TransferOp],
        after: int | None,
        *,
        compare: bool,
    ) -> list[Transfer]:
        begun = self.begin_retrieves(request_ids, ops, after)
        for each in begun:
            each.compared = compare
        return begun


def worker_of(
    client: Any, recorder: Recorder | None = None, *, reallocates: bool = True
) -> ConnectorWorker:
    worker = ConnectorWorker(client, 0, recorder or Recorder(), reallocates=reallocates)
    worker.report()  # the first says that it has no agent yet
    return worker


def begun(
    recorder: Recorder | None = None, *, reallocates: bool = True
) -> tuple[ConnectorWorker, list[Transfer]]:
    client = Client()
    worker = worker_of(client, recorder, reallocates=reallocates)
    worker.begin_loads(StepMetadata(loads=[Planned(7, "r", OPS)]))
    assert [each.op.group for each in client.begun] == [0, 1, 2]
    return worker, client.begun


def taken(recorder: Recorder) -> dict[str, Any]:
    stats = recorder.take()
    assert stats is not None
    assert recorder.take() is None
    return stats.data


def ended_transfers(worker: ConnectorWorker) -> list[int]:
    report = worker.report()
    return [] if report is None else list(report.ended.get(0, []))


def test_adapters_are_reported_when_they_change_or_are_asked_for() -> None:
    worker, _ = begun()
    assert worker.report() is None
    memory: dict[int, bytes] = {}
    worker.adapters = SimpleNamespace(digests=lambda: dict(memory))  # type: ignore[assignment]
    assert worker.report() == WorkerReport({0: []}, adapters={0: {}})
    assert worker.report() is None
    memory[3] = b"digest"
    assert worker.report() == WorkerReport({0: []}, adapters={0: {3: b"digest"}})
    worker.begin_loads(StepMetadata())
    assert worker.report() is None
    worker.begin_loads(StepMetadata(adapters=True))
    told = worker.report()
    assert told == WorkerReport({0: []}, adapters={0: {3: b"digest"}})
    both = told.aggregate(WorkerReport({1: []}, adapters={1: {}}))
    assert both.adapters == {0: {3: b"digest"}, 1: {}}


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


@pytest.mark.parametrize("last", range(3))
def test_a_load_ends_when_all_its_retrieves_are_over(last: int) -> None:
    recorder = Recorder()
    worker, retrieves = begun(recorder)
    for number, retrieve in enumerate(retrieves):
        retrieve.over = number != last
    assert worker.ended_loads(StepMetadata()) == {}
    assert ended_transfers(worker) == []
    retrieves[last].over = True
    ended = worker.ended_loads(StepMetadata())
    assert ended == {"r": set()}
    assert ended_transfers(worker) == [7]
    stats = taken(recorder)
    assert stats["loaded_chunks"] == {"0": 1}, "a chunk of three groups"
    assert [len(each) for each in stats["load_seconds"].values()] == [1]
    assert "failed_chunks" not in stats


@pytest.mark.parametrize(
    ("given_up", "reallocates"),
    [(False, True), (True, True), (True, False)],  # never sent, say, because its GPU hangs
)
@pytest.mark.parametrize("failed", range(3))
def test_a_load_fails_as_a_whole(failed: int, given_up: bool, reallocates: bool) -> None:
    worker, retrieves = begun(reallocates=reallocates)
    retrieves[failed].failed, retrieves[failed].given_up = True, given_up
    for retrieve in retrieves:
        retrieve.over = True
    ended = worker.ended_loads(StepMetadata())
    assert ended == {"r": set(OPS[failed].block_ids)}
    assert worker.report() == WorkerReport({0: [7]}, failed={"r"})
    assert worker.report() is None


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_retrieve_fails_the_load_and_its_blocks_stay_held(lost: int) -> None:
    """vLLM is told at once; the blocks of all groups are free when no retrieve may write."""
    worker, retrieves = begun()
    retrieves[lost].given_up = retrieves[lost].failed = True
    ended = worker.ended_loads(StepMetadata())
    assert ended == {"r": set(OPS[lost].block_ids)}
    report = worker.report()
    assert report == WorkerReport({0: []}, failed={"r"})
    assert report.aggregate(WorkerReport({1: [7]}, failed={"s"})).failed == {"r", "s"}
    for retrieve in retrieves:
        assert worker.ended_loads(StepMetadata()) == {}
        assert ended_transfers(worker) == []
        retrieve.over = True
    assert worker.ended_loads(StepMetadata()) == {}
    assert ended_transfers(worker) == [7]


def test_a_lost_load_into_the_same_blocks_is_awaited() -> None:
    worker, retrieves = begun(reallocates=False)
    for retrieve in retrieves:
        retrieve.given_up = retrieve.failed = True
        assert worker.ended_loads(StepMetadata()) == {}
        retrieve.over = True
    ended = worker.ended_loads(StepMetadata())
    assert ended == {"r": {block for op in OPS for block in op.block_ids}}


def test_a_store_ends_when_all_its_parts_are_over() -> None:
    client, recorder = Client(), Recorder()
    worker = worker_of(client, recorder)
    worker.step_begins(StepMetadata(stores=[Planned(9, "r", OPS)]))
    client.begun[1].result = SimpleNamespace(stored=0, dropped=1)
    for store in client.begun:
        assert ended_transfers(worker) == []
        store.over = True
    report = worker.report()
    assert report is not None
    assert list(report.ended[0]) == [9]
    assert report.dropped
    stats = taken(recorder)
    assert "stored_chunks" not in stats
    assert stats["dropped_chunks"] == {"0": 1}, "a chunk of which a part was dropped"
    assert [len(each) for each in stats["store_seconds"].values()] == [1]


@pytest.mark.parametrize(
    ("specs", "registered"),
    [
        ([full()], [{"layer.0": 16, "shared": 16}]),  # a layer that has the KV of another
        ([full(), replayed(64), full(32)], [{"layer.0": 16}, {"layer.2": 32}]),
        ([ring(8), full()], [{"layer.1": 16}]),
    ],
)
def test_memory_of_left_out_groups_is_not_registered(
    tmp_path: Path, specs: list[Any], registered: list[dict[str, int]]
) -> None:
    layers = ["shared", *(f"layer.{number}" for number in range(len(specs)))]
    caches = {layer: torch.zeros(4, 1, 16, 32) for layer in layers}
    groups, _ = registration(tmp_path, specs, caches)
    assert [dict.fromkeys(each.tensors, each.block_size_tokens) for each in groups] == registered


# ------------------------------------------------------- signals


class CudaClient(Client):
    """Notes what is queued before each transfer. A ticket counts what was queued at its signal."""

    def __init__(self, queued: list[str]) -> None:
        super().__init__()
        self.after: list[list[str]] = []
        self._queued = queued

    def signal(self) -> int | None:
        return len(self._queued)

    def begin_retrieves(
        self, request_ids: Sequence[str], ops: Sequence[TransferOp], after: int | None
    ) -> list[Transfer]:
        self.after.append(self._queued[:after])
        return super().begin_retrieves(request_ids, ops, after)


def on_cuda(queued: list[str]) -> tuple[LMCacheRedisConnector, CudaClient]:
    """A worker's connector, as vLLM calls it, over a stream on which ``queued`` is."""
    client: Any = CudaClient(queued)
    connector = object.__new__(LMCacheRedisConnector)
    connector._connector_metadata = None
    connector._awaited, connector._failed_blocks = {}, set()
    connector._worker = ConnectorWorker(client, 0, Recorder(), reallocates=True)
    return connector, client


def test_transfers_wait_for_what_is_queued_before_the_forward() -> None:
    """The steps before, and the zeroing of new blocks: vLLM queues it when it has the step."""
    queued: list[str] = []
    connector, client = on_cuda(queued)
    for number in range(2):
        queued.append(f"zeroing {number}")
        metadata = StepMetadata(
            loads=[Planned(2 * number, "r", ())], stores=[Planned(2 * number + 1, "s", ())]
        )
        connector.bind_connector_metadata(metadata)
        queued.append(f"forward {number}")
        connector.start_load_kv(None)  # type: ignore[arg-type]
        connector.wait_for_save()
        connector.clear_connector_metadata()
    before = ["zeroing 0", "forward 0", "zeroing 1"]
    assert client.after == [before[:1], before[:1], before, before]


def test_what_never_began_has_ended_if_the_scheduler_asks() -> None:
    """The step that it was sent with has failed, or the one that has reported its end."""
    connector, client = on_cuda([])
    stores = [Planned(1, "s", OPS[:1])]
    connector.bind_connector_metadata(StepMetadata(stores=stores))
    again = StepMetadata(loads=[Planned(3, "r", OPS[:1])], unsure=[1, 2, 3])
    connector.bind_connector_metadata(again)
    connector.start_load_kv(None)  # type: ignore[arg-type]
    report = connector.build_connector_worker_meta()
    assert report is not None
    assert report.ended == {0: [2]}
    client.begun[0].over = True
    report = connector.build_connector_worker_meta()
    assert report is not None
    assert report.ended == {0: [1]}


class Steps:
    """Of a worker's connector, as vLLM calls it."""

    def __init__(self) -> None:
        self.connector, self.client = on_cuda([])
        self.number = 0

    def step(self, **metadata: Any) -> tuple[set[str], set[str]]:
        """The requests whose loads are reported as ended, and as failed."""
        self.number += 1
        self.connector.bind_connector_metadata(StepMetadata(number=self.number, **metadata))
        self.connector.start_load_kv(None)  # type: ignore[arg-type]
        found = self.connector._ended_loads()
        return {*found}, {name for name, blocks in found.items() if blocks}


def test_what_was_told_in_a_lost_step_is_told_again() -> None:
    steps = Steps()
    asked = [Planned(number, f"r{number}", OPS[:1]) for number in (1, 2, 3, 4)]
    steps.step(loads=asked[:3])
    steps.client.begun[0].over = True
    assert steps.step() == ({"r1"}, set())  # this step is lost
    steps.client.begun[1].over = True
    assert steps.step() == ({"r2"}, set())  # this one is not
    # The first was told in the lost step, the third has not ended, and the fourth never began.
    assert steps.step(awaited=asked, lost_steps=[2]) == ({"r1", "r4"}, {"r1", "r4"})
    report = steps.connector.build_connector_worker_meta()
    assert report is not None
    assert {"r1", "r4"} <= report.failed
    # So was the step in which they were told again.
    assert steps.step(awaited=asked, lost_steps=[2, 4]) == ({"r1", "r4"}, {"r1", "r4"})
    assert steps.step(awaited=asked, lost_steps=[2, 4]) == (set(), set())
    steps.client.begun[2].over = True
    assert steps.step() == ({"r3"}, set())


def test_the_chunks_of_a_canary_are_compared() -> None:
    client = Client()
    worker = worker_of(client)
    worker.step_begins(
        StepMetadata(stores=[Planned(1, "r", OPS[:1]), Planned(2, "r", OPS, compare=True)])
    )
    assert [each.compared for each in client.begun] == [False, True, True, True]
    for each in client.begun[1:]:
        assert ended_transfers(worker) == []
        each.over = True
    assert ended_transfers(worker) == [2]
