"""A process that keeps a GPU busy, as an engine does; it prints the milliseconds of its steps.

decode multiplies a small batch with weights that exceed the GPU's cache, prefill a large one. A
step is a replay of a CUDA graph, and the host waits for it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from statistics import fmean

from lmcache_redis.errors import DeviceError

DECODE, PREFILL = KINDS = ("decode", "prefill")

_WIDTH = 8192
_LAYERS = 24
_ROWS = {DECODE: 64, PREFILL: 8192}
_REPORT_S = 0.25
_READY = "ready"


def main(kind: str) -> None:
    import torch

    weights = [
        torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device="cuda") / _WIDTH**0.5
        for _ in range(_LAYERS)
    ]
    rows = torch.randn(_ROWS[kind], _WIDTH, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        hidden = rows
        for weight in weights:
            hidden = hidden @ weight

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    print(_READY, flush=True)
    steps, started_s = 0, time.perf_counter()
    while True:
        graph.replay()
        torch.cuda.synchronize()
        steps += 1
        if (taken_s := time.perf_counter() - started_s) > _REPORT_S:
            print(taken_s / steps * 1e3, flush=True)
            steps, started_s = 0, time.perf_counter()


class Load:
    """The process, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._steps: list[float] = []
        if self._lines.readline().strip() != _READY:
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
def load(kind: str) -> Iterator[Load]:
    """Killed on exit. Raises DeviceError if it does not start."""
    words = [sys.executable, "-m", "benchmarks.gpu.contact.load", kind]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield Load(process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
