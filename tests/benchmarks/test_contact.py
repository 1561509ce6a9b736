# SPDX-License-Identifier: Apache-2.0
"""First contact, rehearsed over the driver of the tests: whatever ends it, its figures are kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.contact import pack
from benchmarks.gpu.contact.figures import (
    Figure,
    Row,
    at_least,
    at_most,
    not_good,
    zero,
)
from benchmarks.gpu.contact.parts import NAMES, Part
from benchmarks.gpu.contact.run import run
from tests import cuda_driver
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]
# What holds with any driver, whatever its speed.
HOLDS = {
    "raw": ["wrong reads", "size of an opened allocation is known", "error of a read"],
    "model": ["other logits"],
    "ipc_close": ["copies that failed"],
    "batch_soak": ["wrong, of 2", "wrong, of 32"],
    "pieces": ["wrong, one piece, direct copies", "wrong, pieces of 2 MiB, kernel"],
    "order": ["wrong, kernel", "wrong, direct copies"],
    "stall": ["pinned, of the pool"],
}
# Of a part in place of its own: what it does after its first figure.
HANGS = """
    context = driver.retain_context(0)
    driver.set_context(context)
    stream, there = driver.create_stream(), driver.allocate(4096)
    here = driver.allocate_pinned(4096)
    driver.enqueue_copy_in(there, here, 4096, stream)
    driver.synchronize_stream(stream)
"""
SLEEPS = "    ctypes.CDLL(None).sleep(1000)"  # a signal would wake it
CRASHES = "    ctypes.string_at(8)"
ENDS = "    pass"


def environment(**settings: int) -> dict[str, str]:
    if why := cuda_driver.missing():
        pytest.skip(why)
    return {"PYTHONPATH": str(ROOT), **cuda_driver.environment(**settings)}


def part(name: str, then: str, limit_s: float = 60.0, **settings: int) -> Part:
    """One that prints a figure, and then does this."""
    source = f"""\
import ctypes
from benchmarks.gpu.contact import child
from benchmarks.gpu.contact.figures import Figure
from lmcache_redis.device import driver
def measure():
    yield Figure("{name}", "first", 1)
{textwrap.indent(textwrap.dedent(then), "    ")}
    yield Figure("{name}", "last", 2)
child.run("{name}", measure())
"""
    return Part(name, (sys.executable, "-c", source), limit_s, environment(**settings))


BOTH = [("first", "1"), ("last", "2")]


def found_in(rows: Sequence[Row], name: str) -> list[tuple[str, str]]:
    return [(row["figure"], str(row["value"])) for row in rows if row["part"] == name]


def written(out: Path) -> list[Row]:
    """The figures on disk, in both files."""
    rows = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    table = (out / "figures.md").read_text().splitlines()
    assert len(table) == 2 + len(rows)
    return rows


@contextlib.contextmanager
def contact(out: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--first-contact", "--quick"]
    process = subprocess.Popen(
        [*command, "--out", str(out), *words],
        env={**os.environ, **environment(delay_us=20)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.long
@pytest.mark.servers
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    with contact(tmp_path) as process:
        said = process.communicate(timeout=240)[0]
    rows = written(tmp_path)
    assert {row["part"] for row in rows} == {"run", *NAMES}, said
    ended = [row for row in rows if row["figure"] in ("failed", "ended", "not run")]
    assert not ended, said
    for name, figures in HOLDS.items():
        for figure in figures:
            verdicts = [
                row["good"]
                for row in rows
                if row["part"] == name and row["figure"].startswith(figure)
            ]
            assert verdicts == [True], (name, figure, said)
    # There is no GPU: that is said, and the status tells it.
    assert ("skipped", "0") not in found_in(rows, "marked")
    assert any(row["part"] == "marked" for row in not_good(rows))
    assert process.returncode == 1


@pytest.mark.servers
def test_a_part_that_hangs_or_crashes_costs_only_its_rest(tmp_path: Path) -> None:
    parts = [
        part("raw", ENDS),
        part("model", HANGS, 2.5, hang=-1),
        part("order", CRASHES),
        part("stall", "1 / 0"),
        part("copies", ENDS),
    ]
    rows, first = run(parts, tmp_path, 60.0), BOTH[0]
    assert found_in(rows, "raw") == found_in(rows, "copies") == BOTH
    assert found_in(rows, "model") == [first, ("ended", "at its limit of 2.5 s")]
    assert found_in(rows, "order") == [first, ("ended", "by SIGSEGV")]
    assert found_in(rows, "stall") == [first, ("failed", "ZeroDivisionError: division by zero")]
    assert written(tmp_path) == rows
    assert "most recent call first" in (tmp_path / "model.log").read_text()
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "order.log").read_text()
    assert {row["part"] for row in not_good(rows)} == {"model", "order", "stall"}


@pytest.mark.servers
def test_the_limit_of_all_parts_keeps_what_is_there(tmp_path: Path) -> None:
    parts = [part("raw", SLEEPS), part("model", ENDS)]
    rows = run(parts, tmp_path, 2.5)
    assert found_in(rows, "raw")[0] == ("first", "1")
    assert [name for name, _ in found_in(rows, "raw")[1:]] == ["ended"]
    assert found_in(rows, "model") == [("not run", "all parts had 2.5 s")]
    assert written(tmp_path) == rows


@pytest.mark.servers
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_whole_keeps_what_is_there(tmp_path: Path, by: signal.Signals) -> None:
    with contact(tmp_path, "--parts", "raw,order") as process:
        assert process.stdout is not None
        assert any(line.startswith("raw  context") for line in process.stdout)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(by)
        process.communicate(timeout=60)
    for name in ("figures.jsonl", "figures.md"):
        assert "context, ms" in (tmp_path / name).read_text()
    wait_until(lambda: not any(is_there(child) for child in children), "the part still runs")


def is_there(pid: str) -> bool:
    """A process that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestPack:
    @pytest.mark.servers
    def test_the_folder_runs_by_itself(self, tmp_path: Path) -> None:
        """Elsewhere, and without a network where this user may make one without."""
        folder = tmp_path / "pack"
        folder.mkdir()
        (folder / "wheels").mkdir()
        pack.fill(folder, f"{sys.version_info[0]}.{sys.version_info[1]}")
        alone = ["unshare", "--map-root-user", "--net"]
        if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
            alone = []
        words = [*alone, sys.executable, folder / "first-contact", "--quick", "--parts", "raw"]
        ran = subprocess.run(
            [*words, "--out", tmp_path / "out"],
            cwd=tmp_path,
            env={**os.environ, **environment()},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found = found_in(written(tmp_path / "out"), "raw")
        assert ("wrong reads", "0") in found, ran.stdout + ran.stderr
        assert found[-1] == ("error of closing after that", "0")


class TestFigures:
    def test_a_verdict_stands_beside_its_criterion(self) -> None:
        good, bad = at_most("p", "wait", 1.0, 2.0, "s"), at_least("p", "rate", 1.0, 2.0, "GB/s")
        assert (good.verdict, bad.verdict) == ("at most 2: good", "at least 2: NOT GOOD")
        plain = Figure("p", "seconds", 1.23456)
        rows = [each.row() for each in (good, bad, plain, zero("p", "wrong", 0))]
        assert rows[2] == {
            "part": "p", "figure": "seconds", "value": "1.235", "criterion": "", "good": None
        }  # fmt: skip
        assert not_good(rows) == [rows[1]]
