# SPDX-License-Identifier: Apache-2.0
"""A connector with faults, which vLLM loads in `test_faulty_connector`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector

_FAULT = Path(os.environ["LMCACHE_REDIS_TEST_FAULT"])


def _fault() -> str:
    return _FAULT.read_text()


class FaultyConnector(LMCacheRedisConnector):
    """Reads from a file, at each step, what is to go wrong."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if _fault() == "scheduler" and num_external_tokens:
            self._scheduler.allocated = None  # type: ignore[union-attr, method-assign, assignment]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._step()
        if _fault() == "worker" and metadata.loads:
            self._worker.begin_loads = None  # type: ignore[union-attr, method-assign, assignment]
        last_rank = self._vllm_config.parallel_config.world_size - 1
        if _fault() == "refused" and self._vllm_config.parallel_config.rank == last_rank:
            # By the agent: a block that does not exist.
            for planned in metadata.loads:
                planned.ops[-1].block_ids[-1] = 1 << 30  # type: ignore[index]
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if _fault() == "output":  # as if the logits were not numbers
            raise FloatingPointError
