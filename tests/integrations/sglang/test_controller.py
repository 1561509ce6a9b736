# SPDX-License-Identifier: Apache-2.0
"""SGLang's own cache controller, its threads included, between a host pool and a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang.test_backend import (
    DYNAMIC,
    LAYERS,
    PAGE,
    fill,
    indices,
    mha,
    page_of,
)  # fmt: skip
from tests.servers import RedisServer

pytestmark = [pytest.mark.servers, pytest.mark.long]

WITHIN_S = 30.0
TOKENS = list(range(3 * PAGE))
# What SGLang knows of ranks once its process groups are built.
ONE_RANK = {
    "attn_dcp_size": 1, "attn_dcp_rank": 0, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1,
}  # fmt: skip


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Any]:
    """Controllers of one rank, each with the door attached as a server attaches it."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.runtime_context import get_parallel

    # As much of a GPU's pool as the controller asks for when only host memory moves.
    device = SimpleNamespace(
        device=torch.device("cpu"), layer_num=LAYERS, register_layer_transfer_counter=lambda _: None
    )
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path))
        stack.enter_context(get_parallel().override(**ONE_RANK))

        def attach(pool: Any) -> Any:
            controller = HiCacheController(
                SimpleNamespace(get_kvcache=lambda: device), pool, PAGE, None, threading.Event(),
                io_backend="direct", storage_backend="dynamic", prefetch_threshold=PAGE,
                model_name="org/model",
                storage_backend_extra_config={**DYNAMIC, "url": redis.unix_url},
            )  # fmt: skip
            stack.callback(controller.detach_storage_backend)
            return controller

        yield attach


def hashes() -> list[str]:
    from sglang.srt.managers.cache_controller import get_storage_hash_str

    found: list[str] = get_storage_hash_str(TOKENS, None, page_size=PAGE)
    return found


def test_a_restarted_server_prefetches_what_another_has_written(attach: Any) -> None:
    written = mha()
    writer = attach(written)
    fill(written, 0, 1, 2)
    writer.write_storage(indices(0, 1, 2), TOKENS, hashes())
    assert writer.ack_backup_queue.get(timeout=WITHIN_S).completed_tokens == len(TOKENS)
    writer.detach_storage_backend()

    read = mha()
    reader = attach(read)
    reader.prefetch("request", [*TOKENS, *range(900, 900 + PAGE)])
    hit = reader.prefetch_hit_queue.get(timeout=WITHIN_S)
    assert hit.storage_hit_count == len(TOKENS)
    # As the scheduler does for a hit.
    hit.host_indices = indices(5, 6, 7)
    reader.prefetch_buffer.put(hit)
    acks = [reader.ack_prefetch_queue.get(timeout=WITHIN_S) for _ in range(2)]
    assert (acks[0].completed_tokens, acks[1].completed_req) == (len(TOKENS), True)
    assert [page_of(read, page) for page in (5, 6, 7)] == [page_of(written, n) for n in range(3)]
    assert not any(page_of(read, 4)), "a neighbour stays"
