"""What stores cost an engine that decodes: steps of matrix products, with and without stores.

A step multiplies a small batch with weights that do not fit the GPU's cache, as a decode step
does: it is bound by reading them. The host waits for each step, as a scheduler does. While it is
busy, the next store is begun as soon as the last is answered: more than any engine stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_redis.bench.gpu.engine import Engine, EngineFailed, Transfer
from lmcache_redis.bench.gpu.rows import DECODE, Row, median, ratio_of, target_of
from lmcache_redis.bench.gpu.timing import wait_for_all

if TYPE_CHECKING:
    import torch

_STORE_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds: of steps, without stores and with, in each round. The rest: what a step is."""

    rounds: int
    seconds: float
    layers: int = 32
    width: int = 8192
    batch: int = 64


class DecodeLoop:
    """The step: ``layers`` times a batch by a square matrix."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        import torch

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self._weights = [
            torch.randn(plan.width, plan.width, dtype=dtype, device=device) / plan.width**0.5
            for _ in range(plan.layers)
        ]
        self._input = torch.randn(plan.batch, plan.width, dtype=dtype, device=device)

    def step(self) -> float:
        """Seconds of one."""
        started_s = time.perf_counter()
        hidden = self._input
        for weight in self._weights:
            hidden = hidden @ weight
        wait_for_all(self._device)
        return time.perf_counter() - started_s


def measure(engine: Engine, plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """One row: the mean step with stores beside it, compared with the mean step without."""
    loop = DecodeLoop(plan, engine.device)
    for _ in range(10):
        loop.step()
    quiet: list[float] = []
    busy: list[float] = []
    stores_per_s: list[float] = []
    for number in range(plan.rounds):
        say(f"decode steps: round {number + 1} of {plan.rounds}")
        # Who begins changes with the round: a GPU that warms up slows both.
        for with_stores in (False, True) if number % 2 == 0 else (True, False):
            if with_stores:
                step_s, rate = _steps_beside_stores(engine, loop, plan.seconds)
                busy.append(step_s)
                stores_per_s.append(rate)
            else:
                quiet.append(_steps(loop, plan.seconds))
    gb_per_s = median(stores_per_s) * engine.bytes_moved / 1e9
    ratios = ratio_of(busy, quiet)
    return [
        Row(
            what=DECODE,
            case=f"{engine.shape.name}, stores at {gb_per_s:.1f} GB/s beside it",
            page_kib=engine.shape.page_bytes / 1024,
            chunks=engine.chunks,
            value=median(busy) * 1e3,
            unit="ms",
            against="the same without stores",
            reference=median(quiet) * 1e3,
            ratio=median(ratios),
            worst=max(ratios),
            target=target_of(DECODE),
            rounds=plan.rounds,
        )
    ]


def _steps(loop: DecodeLoop, seconds: float) -> float:
    """The mean step of so many seconds: a mean, for a store may disturb one step in ten."""
    taken: list[float] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        taken.append(loop.step())
    return sum(taken) / len(taken)


def _steps_beside_stores(engine: Engine, loop: DecodeLoop, seconds: float) -> tuple[float, float]:
    """As `_steps`, and how many stores a second were done: at least one, however long it takes.

    What submitting them takes is in no step.
    """
    taken: list[float] = []
    done = 0
    started_s = time.perf_counter()
    running: Transfer | None = engine.begin_store()
    while running is not None:
        taken.append(loop.step())
        elapsed_s = time.perf_counter() - started_s
        if engine.store_over(running):
            done += 1
            running = engine.begin_store() if elapsed_s < seconds else None
        elif elapsed_s > seconds + _STORE_PATIENCE_S:
            raise EngineFailed("a store was not answered")
    return sum(taken) / len(taken), done / (time.perf_counter() - started_s)
