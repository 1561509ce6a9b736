# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark on CPU tensors, small: everything but its figures and CUDA's own calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import Engine, EngineFailed, Shape
from benchmarks.gpu import kernels, launches, run, transfers
from benchmarks.gpu.counted import SHAPES, count
from benchmarks.gpu.reference import ReferenceCopies
from benchmarks.gpu.rows import (
    DECODE,
    GATHER,
    KIB,
    MIB,
    RETRIEVE,
    RETRIEVE_P50,
    RETRIEVE_P99,
    SCATTER,
    STORE,
    Options,
    Row,
    target_of,
    unmet,
)
from benchmarks.gpu.timing import captured

CPU = torch.device("cpu")
SMALL = Shape("small", 4, 2 * KIB, 16)
ODD = Shape("odd", 3, 1001, 4)
CHUNKS = 3


def a_row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "what": GATHER,
        "case": "8B",
        "page_kib": 32.0,
        "chunks": 4,
        "value": 90.0,
        "unit": "GB/s",
        "against": "a copy",
        "reference": 100.0,
        "ratio": 0.9,
        "worst": 0.8,
        "target": 0.85,
        "rounds": 5,
    }
    return Row(**(fields | changes))


class TestRows:
    def test_throughput_should_be_high_and_time_low(self) -> None:
        assert a_row().met
        assert a_row().verdict() == "at least 0.85: met"
        missed = a_row(ratio=0.84)
        assert missed.verdict() == "at least 0.85: NOT MET"
        slow = a_row(unit="ms", ratio=1.03, target=1.02)
        assert slow.verdict() == "at most 1.02: NOT MET"
        quick = a_row(unit="ms", ratio=1.01, target=1.02)
        unjudged = a_row(unit="ms", ratio=3.0, target=None)
        assert unjudged.verdict() == "no target"
        assert unmet([a_row(), missed, slow, quick, unjudged]) == [missed, slow]

    def test_targets_go_by_the_size_of_pages(self) -> None:
        shapes = [Shape("", 1, n * KIB, 16) for n in (2, 4, 15, 16, 72)]
        for what in (GATHER, SCATTER):
            assert [target_of(what, shape) for shape in shapes] == [0.6, 0.6, 0.6, 0.85, 0.85]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for one another in a busy loop: on a busy machine, for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take a GPU."""
    monkeypatch.setattr(launches, "KernelCopies", ReferenceCopies)


@pytest.mark.usefixtures("by_torch")
class TestKernels:
    @pytest.mark.parametrize("shape", [SMALL, ODD])
    @pytest.mark.parametrize("wrong", [GATHER, SCATTER, "nothing scattered", "more scattered"])
    def test_wrong_bytes_are_not_timed(self, wrong: str, shape: Shape) -> None:
        case = kernels.Case(shape, 2, CPU)
        case.check(2)

        class Wrong(ReferenceCopies):
            def gather(self, ids: Any, staging: torch.Tensor) -> None:
                super().gather(ids, staging)
                staging[5] ^= wrong == GATHER

            def scatter(self, ids: Any, staging: torch.Tensor) -> None:
                if wrong == SCATTER:
                    staging = staging.roll(1)
                if wrong != "nothing scattered":
                    super().scatter(ids, staging)
                case.cache[-1] += wrong == "more scattered"

        case.copies = Wrong(case.layout, [case.cache])
        kind = GATHER if wrong == GATHER else SCATTER
        with pytest.raises(kernels.WrongBytes, match=f"a {kind} of 2 chunks"):
            case.check(2)


def test_a_launch_is_the_share_of_all() -> None:
    ran: list[int] = []
    measured = captured([lambda: ran.append(1), lambda: ran.append(2)], CPU)
    assert measured() > 0
    assert ran == [1, 2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with transfers.engine_beside_agent(SMALL, CHUNKS, CPU, print) as beside:
        yield beside


@pytest.mark.servers
class TestBesideAnAgent:
    def test_other_bytes_than_were_stored_are_found(self, engine: Engine) -> None:
        _, hashes = engine.store()
        engine.retrieve(hashes)
        engine.check()
        engine.memory[2, engine.target_blocks[-1], -1] ^= 1
        with pytest.raises(EngineFailed, match="layer 2: other bytes"):
            engine.check()


class TestRun:
    OPTIONS = Options(
        rounds=1,
        shapes=(SMALL,),
        agent_shapes=(SMALL, ODD),
        chunk_counts=(1,),
        chunks=2,
        retrieves=2,
        seconds=0.05,
        layers=2,
        width=64,
        batch=4,
    )

    @pytest.mark.long
    @pytest.mark.servers
    def test_the_whole_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        monkeypatch.setattr(launches, "KernelCopies", ReferenceCopies)
        monkeypatch.setattr(run, "find_gpu", lambda: CPU)
        monkeypatch.setattr(run, "room_bytes", lambda device: 64 * MIB)
        plot, rows = tmp_path / "plot.png", tmp_path / "rows.json"
        run.run(self.OPTIONS, plot, rows)
        document = json.loads(rows.read_text())
        assert document["machine"]["torch"] == torch.__version__
        assert [(row["what"], row["case"].split(",")[0]) for row in document["rows"]] == [
            (GATHER, "small"),
            (SCATTER, "small"),
            *((what, "small") for what in (STORE, RETRIEVE, RETRIEVE_P50, RETRIEVE_P99)),
            (DECODE, "small"),
            *((what, "odd") for what in (STORE, RETRIEVE, RETRIEVE_P50, RETRIEVE_P99)),
        ]
        assert plot.read_bytes().startswith(b"\x89PNG")
        output = capsys.readouterr().out
        assert "targets: " in output
        assert "left out" not in output

    def test_a_part_that_fails_leaves_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> list[Row]:
            raise EngineFailed("the agent did not map the engine's KV cache")

        monkeypatch.setattr(launches, "KernelCopies", ReferenceCopies)
        monkeypatch.setattr(run, "_beside_agent", fail)
        said: list[str] = []
        rows = run.measure(self.OPTIONS, CPU, 64 * MIB, said.append)
        assert [row.what for row in rows] == [GATHER, SCATTER]
        assert sum("left out: the agent did not map" in line for line in said) == 2
        monkeypatch.setattr(kernels, "measure", fail)
        with pytest.raises(EngineFailed):
            run.measure(self.OPTIONS, CPU, 64 * MIB, said.append)


@pytest.mark.parametrize("scatter", [False, True])
def test_what_batches_save(scatter: bool) -> None:
    """Calls of the driver that a chunk takes, counted without one."""
    shape = SHAPES[0]
    single, batched = (count(shape, 1, batches=each, scatter=scatter) for each in (False, True))
    copy = "cuMemcpyHtoDAsync_v2" if scatter else "cuMemcpyDtoHAsync_v2"
    # A copy for each page, and one more where a stripe ends within one.
    stripes = -(-(32 << 20) // ((1 << 20) - 4096))
    assert single[copy] >= 512
    assert single[copy] <= 512 + stripes
    assert batched[copy] == 0
    assert single.total() - single[copy] == batched.total() - batched["cuMemcpyBatchAsync"]
