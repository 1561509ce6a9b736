"""The connector in a worker: a load or a store of several groups is one transfer for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.client.transfers import LoadStoreOp
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.worker import ConnectorWorker, Planned, StepMetadata

OPS = tuple(
    LoadStoreOp(block_ids=[10 * group, 10 * group + 1], chunk_hashes=[b"hash"], group=group)
    for group in range(3)
)


@dataclass
class Transfer:
    """One operation at the agent."""

    op: LoadStoreOp
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

    on_cuda = False
    place = None

    def __init__(self) -> None:
        self.begun: list[Transfer] = []

    def begin_retrieves(
        self, request_ids: Sequence[str], ops: Sequence[LoadStoreOp], event: Any
    ) -> list[Transfer]:
        assert len(request_ids) == len(ops)
        self.begun += (begun := [Transfer(op) for op in ops])
        return begun

    def begin_stores(
        self, request_ids: Sequence[str], ops: Sequence[LoadStoreOp], event: Any, *, compare: bool
    ) -> list[Transfer]:
        begun = self.begin_retrieves(request_ids, ops, event)
        for each in begun:
            each.compared = compare
        return begun


def begun(
    recorder: Recorder | None = None, *, reallocates: bool = True
) -> tuple[ConnectorWorker, list[Transfer]]:
    client, recorder = Client(), recorder or Recorder()
    worker = ConnectorWorker(client, 0, recorder, reallocates=reallocates)  # type: ignore[arg-type]
    worker.report(0)
    worker.begin_loads(StepMetadata(loads=[Planned(7, "r", OPS)]))
    assert [each.op.group for each in client.begun] == [0, 1, 2]
    return worker, client.begun


def taken(recorder: Recorder) -> dict[str, Any]:
    stats = recorder.take()
    assert stats is not None
    assert recorder.take() is None
    return stats.data


def ended_transfers(worker: ConnectorWorker) -> list[int]:
    report = worker.report(0)
    return [] if report is None else list(report.ended.get(0, []))


@pytest.mark.parametrize("last", range(3))
def test_a_load_ends_when_all_its_retrieves_are_over(last: int) -> None:
    recorder = Recorder()
    worker, retrieves = begun(recorder)
    for number, retrieve in enumerate(retrieves):
        retrieve.over = number != last
    assert worker.ended_loads(StepMetadata()).requests == set()
    assert ended_transfers(worker) == []
    retrieves[last].over = True
    ended = worker.ended_loads(StepMetadata())
    assert (ended.requests, ended.failed) == ({"r"}, {})
    assert ended_transfers(worker) == [7]
    stats = taken(recorder)
    assert stats["loaded_chunks"] == {"0": 3}
    assert [len(each) for each in stats["load_seconds"].values()] == [1]
    assert "failed_chunks" not in stats


@pytest.mark.parametrize("failed", range(3))
def test_a_load_fails_as_a_whole(failed: int) -> None:
    worker, retrieves = begun()
    retrieves[failed].failed = True
    for retrieve in retrieves:
        retrieve.over = True
    ended = worker.ended_loads(StepMetadata())
    assert ended.requests == {"r"}
    assert ended.failed == {"r": set(OPS[failed].block_ids)}
    assert ended_transfers(worker) == [7]


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_retrieve_fails_the_load_and_its_blocks_stay_held(lost: int) -> None:
    """vLLM is told at once; the blocks of all groups are free when no retrieve may write."""
    worker, retrieves = begun()
    retrieves[lost].given_up = retrieves[lost].failed = True
    ended = worker.ended_loads(StepMetadata())
    assert ended.requests == set(ended.failed) == {"r"}
    assert ended_transfers(worker) == []
    for retrieve in retrieves:
        assert worker.ended_loads(StepMetadata()).requests == set()
        assert ended_transfers(worker) == []
        retrieve.over = True
    assert worker.ended_loads(StepMetadata()).requests == set()
    assert ended_transfers(worker) == [7]


def test_where_vllm_computes_into_the_same_blocks_a_lost_load_is_awaited() -> None:
    worker, retrieves = begun(reallocates=False)
    for retrieve in retrieves:
        retrieve.given_up = retrieve.failed = True
        assert worker.ended_loads(StepMetadata()).requests == set()
        retrieve.over = True
    ended = worker.ended_loads(StepMetadata())
    assert ended.failed == {"r": {block for op in OPS for block in op.block_ids}}


def test_a_store_ends_when_all_its_parts_are_over_and_one_drop_is_reported() -> None:
    client, recorder = Client(), Recorder()
    worker = ConnectorWorker(client, 0, recorder, reallocates=True)  # type: ignore[arg-type]
    worker.report(0)
    worker.begin_stores(StepMetadata(stores=[Planned(9, "r", OPS)]))
    client.begun[1].result = SimpleNamespace(stored=0, dropped=1)
    for store in client.begun:
        assert ended_transfers(worker) == []
        store.over = True
    report = worker.report(0)
    assert report is not None
    assert list(report.ended[0]) == [9]
    assert report.dropped
    stats = taken(recorder)
    assert (stats["stored_chunks"], stats["dropped_chunks"]) == ({"0": 2}, {"0": 1})
    assert [len(each) for each in stats["store_seconds"].values()] == [1]


def test_the_chunks_of_a_canary_are_compared() -> None:
    client = Client()
    worker = ConnectorWorker(client, 0, Recorder(), reallocates=True)  # type: ignore[arg-type]
    worker.report(0)
    worker.begin_stores(
        StepMetadata(stores=[Planned(1, "r", OPS[:1])], checks=[Planned(2, "r", OPS)])
    )
    assert [each.compared for each in client.begun] == [False, True, True, True]
    for each in client.begun[1:]:
        assert ended_transfers(worker) == []
        each.over = True
    assert ended_transfers(worker) == [2]
