"""STORE and RETRIEVE through a real agent, beside plain copies between GPU and pinned memory.

A store's time runs until a lookup finds all of it in the host pool, a retrieve's from the question
to the answer: the agent's, the copies', and the way there and back. A plain copy is one
``cudaMemcpyAsync`` of the same bytes and the wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_redis.bench.gpu.engine import Engine
from lmcache_redis.bench.gpu.rows import (
    RETRIEVE,
    RETRIEVE_P50,
    RETRIEVE_P99,
    STORE,
    Row,
    median,
    percentile,
    ratio_of,
    target_of,
)
from lmcache_redis.bench.gpu.timing import wait_for_all

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: of stores and retrieves in turn. retrieves: in the row of p50 and p99."""

    rounds: int
    retrieves: int


class PlainCopy:
    """One copy of so many bytes, each way. The ideal."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch

        on_gpu = device.type != "cpu"
        self._device = device
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def to_host(self) -> float:
        """Seconds."""
        return self._timed(self._host, self._there)

    def to_device(self) -> float:
        """Seconds."""
        return self._timed(self._there, self._host)

    def _timed(self, target: torch.Tensor, source: torch.Tensor) -> float:
        wait_for_all(self._device)
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait_for_all(self._device)
        return time.perf_counter() - started_s


def measure(engine: Engine, plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """Rows of store, retrieve, and the retrieve's median and 99th percentile.

    Raises EngineFailed where chunks are dropped, or come back as others.
    """
    plain = PlainCopy(engine.bytes_moved, engine.device)
    plain.to_host(), plain.to_device()
    hashes = engine.store()[1]
    engine.retrieve(hashes)
    engine.check()
    seconds: dict[str, list[float]] = {"out": [], "in": [], STORE: [], RETRIEVE: []}
    for number in range(plan.rounds):
        say(f"through the agent: round {number + 1} of {plan.rounds}")
        seconds["out"].append(plain.to_host())
        taken, hashes = engine.store()
        seconds[STORE].append(taken)
        seconds["in"].append(plain.to_device())
        seconds[RETRIEVE].append(engine.retrieve(hashes))
    say(f"{plan.retrieves} retrieves")
    ideal: list[float] = []
    retrieves: list[float] = []
    for _ in range(plan.retrieves):
        ideal.append(plain.to_device())
        retrieves.append(engine.retrieve(hashes))
    engine.check()
    return [
        _speed_row(engine, STORE, "plain copy to pinned memory", seconds[STORE], seconds["out"]),
        _speed_row(engine, RETRIEVE, "plain copy from it", seconds[RETRIEVE], seconds["in"]),
        _time_row(engine, RETRIEVE_P50, 50, retrieves, ideal),
        _time_row(engine, RETRIEVE_P99, 99, retrieves, ideal),
    ]


def _speed_row(
    engine: Engine, what: str, against: str, seconds: list[float], plain: list[float]
) -> Row:
    speeds = [engine.bytes_moved / 1e9 / each for each in seconds]
    references = [engine.bytes_moved / 1e9 / each for each in plain]
    ratios = ratio_of(speeds, references)
    return Row(
        what=what,
        case=engine.shape.name,
        page_kib=engine.shape.page_bytes / 1024,
        chunks=engine.chunks,
        value=median(speeds),
        unit="GB/s",
        against=against,
        reference=median(references),
        ratio=median(ratios),
        worst=min(ratios),
        target=target_of(what),
        rounds=len(seconds),
    )


def _time_row(
    engine: Engine, what: str, percent: int, seconds: list[float], ideal: list[float]
) -> Row:
    value, reference = percentile(seconds, percent), median(ideal)
    return Row(
        what=what,
        case=engine.shape.name,
        page_kib=engine.shape.page_bytes / 1024,
        chunks=engine.chunks,
        value=value * 1e3,
        unit="ms",
        against="plain copy from pinned memory, median",
        reference=reference * 1e3,
        ratio=value / reference,
        worst=max(seconds) / reference,
        target=target_of(what),
        rounds=len(seconds),
    )
