# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer, and proof that it would notice; `scripts/fuzz` is the long one."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.mutation import Mutator
from tests.fuzz.runner import fuzz
from tests.fuzz.targets import ACCEPTED, TARGETS, Target

INPUTS = 5_000
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_only_our_own_errors_come_out(target: Target) -> None:
    # Of sockets fewer: each has some of its own.
    inputs = INPUTS // 4 if target.name == "compiled" else INPUTS
    report = fuzz(target, inputs, seed=1)
    assert report.finding is None, str(report.finding)
    assert report.inputs == sum(report.outcomes.values()) == inputs
    # Neither all noise nor all good: both sides of the decoder are reached.
    assert report.outcomes[ACCEPTED] > inputs // 100
    assert inputs - report.outcomes[ACCEPTED] > inputs // 4


def test_a_run_can_be_repeated() -> None:
    target = TARGETS[0]
    first, again, other = (fuzz(target, 500, seed).outcomes for seed in (5, 5, 6))
    assert first == again != other


def test_a_finding_has_the_input_that_brought_it_out() -> None:
    def run(data: bytes, mutator: Mutator) -> str:
        if data.startswith(b":12"):
            raise IndexError("a bug")
        return ACCEPTED

    report = fuzz(dataclasses.replace(TARGETS[0], run=run), 1000, seed=1)
    assert report.finding is not None
    assert report.finding.data.startswith(b":12")
    assert "IndexError: a bug" in str(report.finding)
    assert report.finding.data.hex() in str(report.finding)
    assert report.inputs == report.finding.number


@pytest.mark.servers
def test_the_script_reports_every_target() -> None:
    words = [ROOT / "scripts" / "fuzz", "--inputs", "20", "--seed", "3"]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [target.name for target in TARGETS]
    assert all(": 20 inputs in " in line for line in lines)
