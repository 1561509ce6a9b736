"""One call: its parts in order, each figure beside its criterion."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.gpu.contact import busy, copies, model, order, raw, stall
from benchmarks.gpu.contact.figures import CALLS, CARRIED, Figure, failures, zero
from benchmarks.gpu.run import facts, find_gpu
from benchmarks.report import show, write_json
from lmcache_redis.errors import LMCacheRedisError

_PYTEST = ["-m", "pytest", "-m", "cuda", "tests/device", "-n", "0", "-W", "default", "-q"]

Parts = Mapping[str, Callable[[], list[Figure]]]


def explain() -> str:
    """What to carry, and the calls."""
    calls = "\n".join(
        f"  python -m benchmarks gpu --first-contact {number}    {', '.join(parts)}"
        for number, parts in CALLS.items()
    )
    return (
        "A machine with one GPU, torch (built for CUDA) and pytest needs no network, but this\n"
        "repository, built (python setup.py build_ext --inplace), and these packages:\n"
        f"  {' '.join(CARRIED)}\n"
        f"Three calls, each of at most nine minutes:\n{calls}"
    )


def run(number: int, json: Path | None) -> bool:
    """Measures and prints one call; whether every criterion is met. Raises NoGpu."""
    device = find_gpu()
    parts: Parts = {
        "raw": raw.measure,
        "model": lambda: model.measure(device),
        "stall": stall.measure,
        "copies": copies.measure,
        "busy": busy.measure,
        "order": order.measure,
    }
    figures = measure(CALLS[number], parts)
    if number == 1:
        failed = subprocess.run([sys.executable, *_PYTEST]).returncode
        figures.append(zero("pytest -m cuda", "exit status", failed))
    show(f"first contact, call {number}", [figure.row() for figure in figures])
    known = facts(device)
    print(", ".join(f"{key} {value}" for key, value in known.items()))
    write_json(json, [figure.row() for figure in figures], known)
    bad = failures(figures)
    print(f"{len(bad)} figures are not good" if bad else "every criterion is met")
    return not bad


def measure(names: tuple[str, ...], parts: Parts) -> list[Figure]:
    """The figures of some parts. One that fails is a figure that is not good."""
    figures: list[Figure] = []
    for name in names:
        started_s = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            figures += parts[name]()
        except LMCacheRedisError as error:
            figures.append(Figure(name, "failed", str(error), "runs", good=False))
        print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return figures
