# SPDX-License-Identifier: Apache-2.0
"""The whole run: the GPU, the four questions, the report."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import plots
from benchmarks.engine import Shape
from benchmarks.gpu import decode, kernels, transfers
from benchmarks.gpu.plot import write_plot
from benchmarks.gpu.rows import (
    AGENT,
    DECODING,
    GATHER,
    KERNELS,
    MIB,
    SCATTER,
    Options,
    Row,
    unmet,
)
from benchmarks.report import machine, show, write_json
from lmcache_redis.errors import LMCacheRedisError

if TYPE_CHECKING:
    import torch

# The GPU also holds a context for each process and the agent's staging.
_ROOM = 0.6


class NoGpu(LMCacheRedisError):
    """No GPU can be used here; the message says why."""


def find_gpu() -> torch.device:
    """The first GPU that this process sees. Raises NoGpu."""
    needs = "this benchmark needs an NVIDIA GPU, and a torch that is built for CUDA"
    if importlib.util.find_spec("torch") is None:
        raise NoGpu(f"{needs}: torch is not installed")
    import torch

    if torch.version.cuda is None:
        raise NoGpu(f"{needs}: torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise NoGpu(f"{needs}: torch {torch.__version__} sees no GPU (nvidia-smi lists them)")
    return torch.device("cuda", 0)


def room_bytes(device: torch.device) -> int:
    """The share of the GPU's free memory that the benchmark may use."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0] * _ROOM)


def measure(
    options: Options, device: torch.device, room: int, say: Callable[[str], None]
) -> list[Row]:
    """All rows. A part that fails is left out with a line.

    Raises LMCacheRedisError if all parts fail.
    """
    rows: list[Row] = []
    failed: list[LMCacheRedisError] = []

    def attempt(part: str, measured: Callable[[], list[Row]]) -> None:
        try:
            rows.extend(measured())
        except LMCacheRedisError as error:
            say(f"{part}: left out: {error}")
            failed.append(error)

    if KERNELS in options.parts:
        attempt(KERNELS, partial(kernels.measure, options, device, room, say))
        _give_back(device)
    for number, shape in enumerate(options.agent_shapes):
        # One shape is enough for the decode loop.
        possible = (AGENT,) if number else (AGENT, DECODING)
        wanted = [part for part in possible if part in options.parts]
        if wanted:
            what = f"{' and '.join(wanted)}, {shape.name}"
            attempt(what, partial(_beside_agent, options, shape, wanted, device, say))
            _give_back(device)
    if failed and not rows:
        raise failed[0]
    return rows


def _beside_agent(
    options: Options,
    shape: Shape,
    parts: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
) -> list[Row]:
    rows: list[Row] = []
    size = f"{options.chunks * shape.chunk_bytes // MIB} MiB"
    say(f"an engine, {shape.name}, {options.chunks} chunks ({size}) at a time, and its agent")
    with transfers.engine_beside_agent(shape, options.chunks, device, say) as engine:
        if AGENT in parts:
            rows += transfers.measure(engine, options, say)
        if DECODING in parts:
            rows += decode.measure(engine, options, say)
    return rows


def _give_back(device: torch.device) -> None:
    """Frees torch's unused GPU memory, of which the agent's process needs some."""
    if device.type != "cpu":
        import torch

        torch.cuda.empty_cache()


def facts(device: torch.device) -> dict[str, Any]:
    """The facts of the machine and its GPU, shown with every figure."""
    import torch

    found = machine()
    found["torch"] = torch.__version__
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def report(rows: Sequence[Row], known: dict[str, Any], plot: Path) -> None:
    """Prints the tables and draws the plot."""
    moved = [row for row in rows if row.what in (GATHER, SCATTER)]
    if moved:
        show("gather and scatter, GB/s read and written, medians", list(map(_kernel_cells, moved)))
    others = [row for row in rows if row not in moved]
    if others:
        show("beside the agent, medians", list(map(_agent_cells, others)))
    print(", ".join(f"{key} {value}" for key, value in known.items()))
    missed = unmet(rows)
    judged = [row for row in rows if row.target is not None]
    print(f"targets: {len(judged) - len(missed)} of {len(judged)} met")
    caption = f"{known.get('gpu', 'no GPU')}, torch {known['torch']}, medians"
    plots.report(lambda: write_plot(plot, rows, caption))


def run(options: Options, plot: Path, json: Path | None) -> None:
    """Measures, writes the rows as JSON if asked to, and reports. Raises NoGpu."""
    device = find_gpu()
    started_s = time.monotonic()
    rows = measure(options, device, room_bytes(device), lambda line: print(line, flush=True))
    known = facts(device)
    write_json(json, [asdict(row) | {"met": row.met} for row in rows], known)
    report(rows, known, plot)
    print(f"{time.monotonic() - started_s:.0f} s in all")


def _kernel_cells(row: Row) -> dict[str, Any]:
    return {
        "layout": row.case,
        "page KiB": f"{row.page_kib:g}",
        "chunks": row.chunks,
        "what": row.what,
        "GB/s": f"{row.value:.0f}",
        "copy of the same": f"{row.reference:.0f}",
        "ratio": row.ratio,
        "worst round": row.worst,
        "of peak": row.of_peak,
        "launch, us": None if row.launch_us is None else f"{row.launch_us:.0f}",
        "target": row.verdict(),
    }


def _agent_cells(row: Row) -> dict[str, Any]:
    return {
        "what": row.what,
        "case": row.case,
        "chunks": row.chunks,
        "value": f"{row.value:.2f} {row.unit}",
        "against": f"{row.reference:.2f} {row.unit}, {row.against}",
        "ratio": row.ratio,
        "worst": row.worst,
        "rounds": row.rounds,
        "target": row.verdict(),
    }
