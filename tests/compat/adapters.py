# SPDX-License-Identifier: Apache-2.0
"""The adapters of one engine, as callers of LMCache's make them, with KV tensors but no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lmcache_redis.compat.multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
)
from tests.harness import AgentServer, block_hashes, wait_until

MODEL = "test/model"
BLOCK = 16
CHUNK = 64  # of the harness's agent: four blocks
BLOCKS = 40
HASHES = block_hashes("prompt", 8)
TOKENS = list(range(1000, 1150))  # two chunks and a rest
NO_CONTEXT: Any = None  # which the adapters take and do not use


def caches(device: str = "cpu", block: int = BLOCK) -> dict[str, torch.Tensor]:
    shape = (2, BLOCKS, block, 2, 8)
    return {f"model.layers.{n}.attn": torch.rand(shape, device=device) for n in range(3)}


def copied(caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: cache.clone() for name, cache in caches.items()}


def assert_moved(
    caches: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], pairs: dict[int, int]
) -> None:
    """Block ``to`` holds the bytes of ``from``; every other block is unchanged."""
    for name, cache in caches.items():
        expected = before[name].clone()
        for source, target in pairs.items():
            expected[:, target] = before[name][:, source]
        assert torch.equal(cache, expected), name


def scheduler_of(
    agent: AgentServer, model: str = MODEL, world: int = 1, rank: int = 0, block: int = BLOCK,
    **named: Any,
) -> LMCacheMPSchedulerAdapter:  # fmt: skip
    args = agent.endpoint, NO_CONTEXT, model, world, rank, block
    return LMCacheMPSchedulerAdapter(*args, **named)


def worker_of(
    agent: AgentServer, model: str = MODEL, world: int = 1, rank: int = 0, block: int = BLOCK,
    **named: Any,
) -> LMCacheMPWorkerAdapter:  # fmt: skip
    args = agent.endpoint, NO_CONTEXT, model, world, rank, block
    return LMCacheMPWorkerAdapter(*args, **named)


class Pair:
    """A scheduler and a worker of one engine."""

    def __init__(self, agent: AgentServer, **named: Any) -> None:
        self.scheduler = scheduler_of(agent, **named)
        self.worker = worker_of(agent, **named)
        self.caches = caches()
        self.worker.register_kv_caches(self.caches)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def op_of(blocks: range, hashes: list[bytes] = HASHES) -> LoadStoreOp:
    return LoadStoreOp(list(blocks), None, hashes)


def store(worker: LMCacheMPWorkerAdapter, request_id: str, op: LoadStoreOp, **named: Any) -> None:
    worker.submit_store_request(request_id, op, None, **named)
    wait_until(lambda: request_id in worker.get_finished({request_id})[0])
    worker.get_finished(set())


def load(worker: LMCacheMPWorkerAdapter, request_id: str, op: LoadStoreOp) -> None:
    worker.submit_retrieve_request(request_id, op, None)
    finished_retrieves(worker, request_id)


def lookup(
    scheduler: LMCacheMPSchedulerAdapter,
    request_id: str,
    hashes: list[bytes] | None = HASHES,
    **named: Any,
) -> int:
    scheduler.maybe_submit_lookup_request(request_id, hashes, **named)
    return looked_up(scheduler, request_id)


def looked_up(scheduler: LMCacheMPSchedulerAdapter, request_id: str) -> int:
    found: list[int] = []

    def known() -> bool:
        tokens = scheduler.check_lookup_result(request_id)
        found.extend([] if tokens is None else [tokens])
        return tokens is not None

    wait_until(known, "a lookup")
    return found[0]


def finished_retrieves(worker: LMCacheMPWorkerAdapter, *request_ids: str) -> None:
    seen: set[str] = set()
    wait_until(lambda: seen.update(worker.get_finished(set())[1]) or seen == set(request_ids))
