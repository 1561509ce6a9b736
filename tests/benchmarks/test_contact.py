"""First contact: its parts over the driver of the tests, small; its figures and their verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu.contact.figures import CALLS, Figure, at_least, at_most, failures, zero
from benchmarks.gpu.contact.run import Parts, explain, measure
from lmcache_redis.errors import DeviceError
from tests import cuda_driver

PARTS = """
import json, sys
from benchmarks.gpu.contact import copies, order, raw, stall
parts = {
    "raw": lambda: raw.measure(1 << 20, rounds=5, busy=2),
    "copies": lambda: copies.measure((4096, 65536), 1 << 20),
    "order": lambda: order.measure(2.0, busy=4),
    "stall": lambda: stall.measure(64 << 20, 256 << 20),
}
print(json.dumps([figure.row() for figure in parts[sys.argv[1]]()]))
"""
# What holds with any GPU, whatever its speed.
HOLDS = {
    "raw": ["wrong reads", "size of an opened allocation is known", "error of a read"],
    "copies": [],
    "order": ["wrong, kernel", "wrong, direct copies"],
    "stall": ["pinned, of the pool"],
}


@pytest.mark.servers
@pytest.mark.parametrize("part", HOLDS)
def test_a_part_runs_over_the_tests_driver(part: str) -> None:
    environment = {**os.environ, **cuda_driver.environment(delay_us=50)}
    words = [sys.executable, "-c", PARTS, part]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout.splitlines()[-1])
    for name in HOLDS[part]:
        found = [row["criterion"] for row in rows if row["figure"].startswith(name)]
        assert found
        assert all(each.endswith(": good") for each in found), rows


def test_a_verdict_stands_beside_its_criterion() -> None:
    good, bad = at_most("p", "wait", 1.0, 2.0, "s"), at_least("p", "rate", 1.0, 2.0, "GB/s")
    assert (good.verdict, bad.verdict) == ("at most 2: good", "at least 2: NOT GOOD")
    plain = Figure("p", "seconds", 1.23456)
    assert plain.row() == {"part": "p", "figure": "seconds", "value": "1.235", "criterion": ""}
    assert failures([good, bad, plain, zero("p", "wrong", 0)]) == [bad]


def test_a_part_that_fails_is_a_figure_that_is_not_good() -> None:
    def fail() -> list[Figure]:
        raise DeviceError("no such GPU")

    parts: Parts = {"a": fail, "b": lambda: [zero("b", "wrong", 0)]}
    figures = measure(("a", "b"), parts)
    assert [(each.part, each.good) for each in figures] == [("a", False), ("b", True)]
    assert figures[0].value == "no such GPU"


def test_each_part_is_in_one_call_and_explained() -> None:
    named = [part for parts in CALLS.values() for part in parts]
    assert len(named) == len(set(named)) == 6
    assert all(part in explain() for part in named)
