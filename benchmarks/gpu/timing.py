# SPDX-License-Identifier: Apache-2.0
"""The time of work on a GPU, without that of the Python that queues it.

Kernels of a few microseconds are shorter than a launch from Python. They are captured into a CUDA
graph once, which is replayed between two events. On the CPU, for tests, a clock is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Launch = Callable[[], object]
Measure = Callable[[], float]

_LEAST_S = 0.02
_MOST_REPLAYS = 200


def captured(launches: Sequence[Launch], device: torch.device) -> Measure:
    """A function that runs all launches repeatedly and returns the seconds of one.

    The launches neither allocate nor wait. Together they should touch several times the size of the
    GPU's cache; otherwise the cache is measured.
    """
    if device.type == "cpu":
        return lambda: _on_the_cpu(launches)
    import torch

    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles what has to be compiled
            launch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()

    def replay(times: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    replay(1)
    times = min(_MOST_REPLAYS, max(2, round(_LEAST_S / max(replay(2) / 2, 1e-6))))
    return lambda: replay(times) / (times * len(launches))


def wait_for_all(device: torch.device) -> None:
    """Waits until the GPU has done all work that this process has queued."""
    if device.type != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _on_the_cpu(launches: Sequence[Launch]) -> float:
    started = time.perf_counter()
    for launch in launches:
        launch()
    return (time.perf_counter() - started) / len(launches)
