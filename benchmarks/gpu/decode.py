# SPDX-License-Identifier: Apache-2.0
"""What stores cost an engine that decodes: steps of matrix products, with and without stores.

A step multiplies a small batch with weights that exceed the GPU's cache: like a decode step, it
is bound by reading them. The host waits for each step, as a scheduler does. With stores, the next
store starts as soon as the last is answered, which is more than any engine stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.engine import Engine, EngineFailed, Transfer
from benchmarks.gpu.rows import DECODE, Options, Row, time_row_of
from benchmarks.gpu.timing import wait_for_all
from benchmarks.report import ratios, rotated

if TYPE_CHECKING:
    import torch

_STORE_WITHIN_S = 30.0


class DecodeLoop:
    """The step: ``layers`` times a batch by a square matrix."""

    def __init__(self, options: Options, device: torch.device) -> None:
        import torch

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self._weights = [
            torch.randn(options.width, options.width, dtype=dtype, device=device)
            / options.width**0.5
            for _ in range(options.layers)
        ]
        self._input = torch.randn(options.batch, options.width, dtype=dtype, device=device)

    def step(self) -> float:
        """Seconds of one."""
        started_s = time.perf_counter()
        hidden = self._input
        for weight in self._weights:
            hidden = hidden @ weight
        wait_for_all(self._device)
        return time.perf_counter() - started_s


def measure(engine: Engine, options: Options, say: Callable[[str], None]) -> list[Row]:
    """One row: the mean step with stores beside it, compared with the mean step without."""
    loop = DecodeLoop(options, engine.device)
    for _ in range(10):
        loop.step()
    quiet: list[float] = []
    busy: list[float] = []
    stores_per_s: list[float] = []
    for number in range(options.rounds):
        say(f"decode steps: round {number + 1} of {options.rounds}")
        # The order changes with the round, because a GPU slows down as it warms up.
        for with_stores in rotated((False, True), number):
            if with_stores:
                step_s, rate = _steps_beside_stores(engine, loop, options.seconds)
                busy.append(step_s)
                stores_per_s.append(rate)
            else:
                quiet.append(_steps(loop, options.seconds))
    gb_per_s = median(stores_per_s) * engine.bytes_moved / 1e9
    slower = ratios(busy, quiet)
    return [
        time_row_of(
            engine,
            DECODE,
            median(busy),
            median(quiet),
            "the same without stores",
            ratio=median(slower),
            worst=max(slower),
            rounds=options.rounds,
            detail=f", stores at {gb_per_s:.1f} GB/s beside it",
        )
    ]


def _steps(loop: DecodeLoop, seconds: float) -> float:
    """The mean step over ``seconds``; not the median, since a store may slow one step in ten."""
    taken: list[float] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        taken.append(loop.step())
    return sum(taken) / len(taken)


def _steps_beside_stores(engine: Engine, loop: DecodeLoop, seconds: float) -> tuple[float, float]:
    """As `_steps`, with concurrent stores, and the stores a second: at least one is done.

    The time of submitting them is not part of a step.
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
        elif elapsed_s > seconds + _STORE_WITHIN_S:
            raise EngineFailed("a store was not answered")
    return sum(taken) / len(taken), done / (time.perf_counter() - started_s)
