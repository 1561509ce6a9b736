# SPDX-License-Identifier: Apache-2.0
"""The adapters of one engine, as callers of LMCache's make them, with KV tensors but no model."""

from __future__ import annotations

from typing import Any

import torch
import zmq

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


def caches(device: str = "cpu", block: int = BLOCK) -> dict[str, torch.Tensor]:
    shape = (2, BLOCKS, block, 2, 8)
    return {f"model.layers.{n}.attn": torch.rand(shape, device=device) for n in range(3)}


def copied(caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: cache.clone() for name, cache in caches.items()}


def assert_moved(
    caches: dict[str, torch.Tensor], before: dict[str, torch.Tensor], pairs: dict[int, int]
) -> None:
    """Block ``to`` holds the bytes of ``from``; every other block is unchanged."""
    for name, cache in caches.items():
        expected = before[name].clone()
        for source, target in pairs.items():
            expected[:, target] = before[name][:, source]
        assert torch.equal(cache, expected), name


class Pair:
    """A scheduler and a worker of one engine, made with the originals' arguments alone."""

    def __init__(self, agent: AgentServer, context: zmq.Context[Any]) -> None:
        self.scheduler = LMCacheMPSchedulerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
        self.worker = LMCacheMPWorkerAdapter(agent.endpoint, context, MODEL, 1, 0, BLOCK)
        self.caches = caches()
        self.worker.register_kv_caches(self.caches)

    def store(self, request_id: str, hashes: list[bytes], blocks: range) -> None:
        op = LoadStoreOp(block_ids=list(blocks), block_hashes=hashes)
        self.worker.submit_store_request(request_id, op, None)
        wait_until(lambda: request_id in self.worker.get_finished({request_id})[0])
        self.worker.get_finished(set())

    def lookup(self, request_id: str, **names: Any) -> int:
        self.scheduler.maybe_submit_lookup_request(request_id, **names)
        return looked_up(self.scheduler, request_id)


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
