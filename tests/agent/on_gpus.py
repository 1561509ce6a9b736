# SPDX-License-Identifier: Apache-2.0
"""Agents and engines on GPUs of the tests' driver, and what stays as it was in their blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import cuda_driver
from tests.agent.starts import Starts
from tests.cuda_driver.engine import GpuEngine, Host, gpus
from tests.cuda_driver.played import PlayerProcess
from tests.harness import AgentServer, block_hashes

needs_the_driver = [
    pytest.mark.servers,
    pytest.mark.skipif(cuda_driver.missing() is not None, reason=f"{cuda_driver.missing()}"),
]

HASHES, TOKENS = block_hashes("a prompt", 16), 256
SOURCE, TARGET = range(16), range(24, 40)
DIRECT, BY_KERNELS = 4096, 1 << 20  # bytes: the harness's pages have 8192
either_way = pytest.mark.parametrize("direct", [DIRECT, BY_KERNELS], ids=["direct", "kernels"])


class Node:
    """Two GPUs. What it starts ends with the test, before they do."""

    def __init__(self, host: Host, start: Starts, directory: Path) -> None:
        self.host = host
        self.start = start
        self._directory = directory

    def agent(self, direct: int = BY_KERNELS, **options: Any) -> AgentServer:
        return self.start.agent(direct_copy_bytes=direct, **options)

    def engine(self, agent: AgentServer, **options: Any) -> GpuEngine:
        return self.start.enter(GpuEngine(agent.endpoint, self.host, **options))

    def player(self, agent: AgentServer, seed: int, **options: Any) -> PlayerProcess:
        return self.start.enter(PlayerProcess(agent.endpoint, seed, self._directory, **options))


@contextmanager
def new_node(directory: Path, redis_url: str) -> Iterator[Node]:
    with gpus(devices=2, delay_us=300) as host, ExitStack() as stack:
        yield Node(host, Starts(stack, directory, redis_url), directory)


def in_agents() -> dict[str, str]:
    """The settings of the driver in agents, not in this process."""
    return dict(os.environ)


def set_in_agents(name: str, value: int) -> None:
    cuda_driver.set(name, value, in_agents())


def blocks_of(engine: GpuEngine, blocks: Sequence[int]) -> list[torch.Tensor]:
    caches = engine.snapshot()
    return [tensor[list(blocks)] for each in caches for tensor in each.values()]


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def store(engine: GpuEngine) -> None:
    engine.randomize(SOURCE)
    engine.store("store", HASHES, SOURCE)


def assert_hit(engine: GpuEngine, request: str) -> None:
    """What was stored of SOURCE is loaded into TARGET, and nothing else changes."""
    engine.randomize(range(40, 48))
    around = [*range(24), *range(40, 48)]
    expected, others = blocks_of(engine, SOURCE), blocks_of(engine, around)
    assert engine.lookup(request, HASHES) == TOKENS
    engine.zero(TARGET)
    assert engine.retrieve(request, HASHES, TARGET) == set()
    assert equal(blocks_of(engine, TARGET), expected)
    assert equal(blocks_of(engine, around), others)
    engine.scheduler.end_session(request)
