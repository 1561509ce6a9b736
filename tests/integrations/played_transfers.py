# SPDX-License-Identifier: Apache-2.0
"""The transfers of a played engine's worker: they end some steps after they begin, at random.

A load may fail, and a failed one may go on to write while vLLM already uses the request's other
blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import Planned, StepMetadata, Told, WorkerReport
from tests.integrations.played_memory import Agent, Memory


@dataclass
class Counts:
    """What happened, so that a test knows what it has tested.

    overlapped: steps scheduled while another was in flight. accepted, rejected: draft tokens.
    resets: that succeeded. deferred: resets with blocks that wait for a step in flight.
    """

    loads: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    loaded_parts: dict[int, int] = field(default_factory=dict)
    stored_parts: dict[int, int] = field(default_factory=dict)
    compared_parts: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    overlapped: int = 0
    accepted: int = 0
    rejected: int = 0
    lost_steps: int = 0
    lost_loads: int = 0
    resets: int = 0
    deferred: int = 0

    def totals(self) -> dict[str, int]:
        """Of all groups."""
        counts = vars(self).items()
        return {name: n if isinstance(n, int) else sum(n.values()) for name, n in counts}


@dataclass
class _Load:
    """told: vLLM has learned that it failed."""

    planned: Planned
    told: bool = False


class Transfers:
    """fail: the share of loads that fail. hold: no load ends."""

    def __init__(
        self,
        agent: Agent,
        memory: Memory,
        pool: Any,
        groups: Sequence[LayerGroup],
        rng: random.Random,
        fail: float,
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._pool = pool
        self._groups = groups
        self._rng = rng
        self._fail = fail
        self.hold = False
        self.counts = Counts()
        self._loads: list[_Load] = []
        self._stores: list[Planned] = []
        self._ended: list[int] = []
        self._told = Told()

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._stores or self._ended)

    def check_load(self, load: Planned, request: Request, table: Sequence[Sequence[int]]) -> None:
        """It writes exactly the blocks that are neither null nor local, up to its end."""
        end = request.num_computed_tokens
        if any(group.reach.kind != "all" for group in self._groups):
            assert end <= request.num_tokens - 1
        for op in load.ops:
            group = self._groups[op.group]
            self._check_pinned(load, op)
            written = list(op.block_ids[op.skip_blocks :])
            own = [
                block_id
                for block_id in table[group.number][: end // group.block_size_tokens]
                if self._pool.blocks[block_id].block_hash is None
                and not self._pool.blocks[block_id].is_null
            ]
            assert written == own
            for block_id in written:
                assert self._pool.blocks[block_id].ref_cnt == 2, "the request's and the connector's"

    def check_store(self, store: Planned) -> None:
        """Its blocks are held, and what it compares is pinned."""
        for op in store.ops:
            for block_id in op.block_ids:
                assert self._pool.blocks[block_id].ref_cnt > 0
            if store.compare:
                self._check_pinned(store, op)

    def _check_pinned(self, planned: Planned, op: TransferOp) -> None:
        # When a comparison begins, its lookup may be over: the agent looks for what it still has.
        pinned = self._agent.was_pinned if planned.compare else self._agent.pinned
        for name in op.hashes:
            assert (op.group, name) in pinned[planned.request_id], (
                "a part that no lookup has pinned"
            )

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Before the step computes; some are quick. Reports of lost steps are made again."""
        self._told.step = metadata.number
        begun = [load.planned.transfer_id for load in self._loads]
        begun += [store.transfer_id for store in self._stores]
        self._ended.extend(each for each in metadata.unsure if each not in begun)
        for load in metadata.awaited:
            self._told.again(load, load.transfer_id in begun, metadata.lost_steps)
        for load in metadata.loads:
            self.counts.loads += 1
            self._loads.append(_Load(load))
            if self._rng.random() < 0.2:
                self._write(load)

    def begin_stores(self, metadata: StepMetadata) -> None:
        """After the step has computed."""
        for store in metadata.stores:
            for op in store.ops:
                self._memory.read(op)
            self._stores.append(store)

    def end_some(self, lost: Set[str]) -> KVConnectorOutput:
        """Ends transfers at random, and reports it. lost: requests whose loads never began."""
        again = self._told.take_lost().keys()
        self.counts.lost_loads += len(again)
        lost = lost | again
        received, failed = set(lost), set(lost)
        for load in list(self._loads):
            request_id = load.planned.request_id
            if self.hold or self._rng.random() < 0.5:
                continue
            if not load.told and self._rng.random() < self._fail:
                # vLLM is told at once; the agent may still write.
                received.add(request_id)
                failed.add(request_id)
                self.counts.failed_loads += 1
                load.told = True
                self._told.add(load.planned.transfer_id)
                self._write(load.planned, spoil=True)
                continue
            self._loads.remove(load)
            self._ended.append(load.planned.transfer_id)
            if load.told:
                self.counts.late_loads += 1
                self._write(load.planned, spoil=True)
                continue
            received.add(request_id)
            self._told.add(load.planned.transfer_id)
            if not self._write(load.planned, count=True):
                failed.add(request_id)
                self.counts.failed_loads += 1
        for store in list(self._stores):
            if self._rng.random() < 0.5:
                self._stores.remove(store)
                self._end_store(store)
                self._ended.append(store.transfer_id)
        report = None
        if self._ended or failed:
            report = WorkerReport({0: self._ended}, failed=frozenset(failed - lost))
        self._ended = []
        return KVConnectorOutput(
            finished_recving=received, failed_recving=failed, kv_connector_worker_meta=report
        )

    def _end_store(self, store: Planned) -> None:
        """Reads parts into the agent, or compares them with its own."""
        counts = self.counts.compared_parts if store.compare else self.counts.stored_parts
        for op in store.ops:
            for name, content in self._memory.read(op).items():
                counts[op.group] = counts.get(op.group, 0) + 1
                if store.compare:
                    assert self._agent.parts.get((op.group, name), content) == content
                else:
                    self._agent.parts[op.group, name] = content

    def _write(self, load: Planned, *, spoil: bool = False, count: bool = False) -> bool:
        """Writes the parts; False if one is gone. spoil: writes something else."""
        complete = True
        for op in load.ops:
            per_part = len(op.block_ids) // len(op.hashes)
            for number, name in enumerate(op.hashes):
                part = self._agent.parts.get((op.group, name))
                if part is None:
                    complete = False
                    continue
                loaded = self.counts.loaded_parts
                loaded[op.group] = loaded.get(op.group, 0) + count
                for n, content in enumerate(part, start=number * per_part):
                    if n >= op.skip_blocks:
                        self._memory.write(op.block_ids[n], "spoiled" if spoil else content)
        return complete
