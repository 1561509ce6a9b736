# SPDX-License-Identifier: Apache-2.0
"""Feeds a target until it has had its inputs, or something is found."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass

from tests.fuzz.mutation import Mutator
from tests.fuzz.targets import Target


@dataclass(frozen=True)
class Finding:
    """An input that brought out something which is not ours."""

    target: str
    number: int
    data: bytes
    trace: str

    def __str__(self) -> str:
        return (
            f"{self.target}: input {self.number} brought out:\n{self.trace}\n"
            f"the input: bytes.fromhex('{self.data.hex()}')"
        )


@dataclass(frozen=True)
class Report:
    """What became of the inputs of one target, by outcome."""

    target: str
    inputs: int
    outcomes: dict[str, int]
    seconds: float
    finding: Finding | None

    def __str__(self) -> str:
        said = ", ".join(f"{name} {count:,}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.target}: {self.inputs:,} inputs in {self.seconds:.1f} s "
            f"({self.inputs / self.seconds:,.0f} a second): {said}"
        )


def fuzz(target: Target, inputs: int, seed: int) -> Report:
    """The same inputs for the same seed, whatever came before."""
    mutator = Mutator(seed, target.good, target.tokens)
    make, run = target.make, target.run
    outcomes: Counter[str] = Counter()
    finding = None
    started = time.perf_counter()
    number = 0
    for number in range(1, inputs + 1):
        data = make(mutator)
        try:
            outcomes[run(data, mutator)] += 1
        except Exception:
            finding = Finding(target.name, number, data, traceback.format_exc())
            break
    seconds = max(time.perf_counter() - started, 1e-9)
    return Report(target.name, number, dict(outcomes), seconds, finding)
