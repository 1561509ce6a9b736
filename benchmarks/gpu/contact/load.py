# SPDX-License-Identifier: Apache-2.0
"""A process that keeps a GPU busy, as an engine does; it prints the milliseconds of its steps.

decode multiplies a small batch with weights that exceed the GPU's cache, prefill a large one. A
step is a replay of a CUDA graph, and the host waits for it. Where torch has no GPU it computes on
the CPU, which says nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch

DECODE, PREFILL = KINDS = ("decode", "prefill")

_WIDTH, _SMALL_WIDTH = 8192, 64
_LAYERS = 24
_ROWS = {DECODE: 64, PREFILL: 8192}
_SMALL_ROWS = 8
_REPORT_S = 0.25
_READY = "ready"
_SMALL, _LARGE = "small", "large"


def main(kind: str, size: str) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, height = (_SMALL_WIDTH, _SMALL_ROWS) if size == _SMALL else (_WIDTH, _ROWS[kind])
    weights = [
        torch.randn(width, width, dtype=torch.bfloat16, device=device) / width**0.5
        for _ in range(_LAYERS)
    ]
    rows = torch.randn(height, width, dtype=torch.bfloat16, device=device)
    step = _step_of(rows, weights)
    print(_READY, device, flush=True)
    steps, started_s = 0, time.perf_counter()
    while True:
        step()
        steps += 1
        if (taken_s := time.perf_counter() - started_s) > _REPORT_S:
            print(taken_s / steps * 1e3, flush=True)
            steps, started_s = 0, time.perf_counter()


def _step_of(rows: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], None]:
    import torch

    def step() -> None:
        hidden = rows
        for weight in weights:
            hidden = hidden @ weight

    step()
    if not rows.is_cuda:
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


class Load:
    """The process, from outside. device: where it computes, as torch names it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._steps: list[float] = []
        ready, _, self.device = self._lines.readline().strip().partition(" ")
        if ready != _READY:
            raise DeviceError("the load did not start: see its error above")
        threading.Thread(target=self._read, daemon=True).start()

    def step_ms(self, for_s: float) -> float:
        """The mean step from now on, for so long."""
        del self._steps[:]
        time.sleep(for_s)
        # The first figure began before.
        return fmean(self._steps[1:] or self._steps or [0.0])

    def _read(self) -> None:
        for line in self._lines:
            self._steps.append(float(line))


@contextlib.contextmanager
def load(kind: str, *, small: bool = False) -> Iterator[Load]:
    """Killed on exit. Raises DeviceError if it does not start."""
    words = [sys.executable, "-m", "benchmarks.gpu.contact.load", kind, _SMALL if small else _LARGE]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield Load(process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
