# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark on CPU tensors, small: everything but its figures and CUDA's own calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engine import Engine, EngineFailed, Shape
from benchmarks.gpu import decode, kernels, launches, run, transfers
from benchmarks.gpu.plot import write_plot
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
    SHAPES,
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

    def test_shapes_are_those_of_the_models(self) -> None:
        """Bytes a token: 2 * layers * KV heads * head size * bytes, and 576 elements of MLA."""
        tokens = {
            "8B, bf16": 2 * 32 * 8 * 128 * 2,
            "8B, fp8": 2 * 32 * 8 * 128,
            "70B TP8, bf16": 2 * 80 * 128 * 2,
            "70B TP8, fp8": 2 * 80 * 128,
            "MLA, bf16": 61 * 576 * 2,
        }
        assert {shape.name: shape.chunk_bytes for shape in SHAPES} == {
            name: 256 * nbytes for name, nbytes in tokens.items()
        }
        assert {shape.block_tokens for shape in SHAPES} == {16, 64}


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


def measured(*shapes: Shape, room: int = 1 << 30, say: Callable[[str], None] = print) -> list[Row]:
    options = Options(
        rounds=2, shapes=shapes, chunk_counts=(1, 2, 5), cold_bytes=MIB, peak_bytes=MIB
    )
    return kernels.measure(options, CPU, room, say)


@pytest.mark.usefixtures("by_torch")
class TestKernels:
    def test_rows_of_each_shape_and_count(self) -> None:
        said: list[str] = []
        rows = measured(SMALL, ODD, say=said.append)
        assert [(row.case, row.chunks, row.what) for row in rows] == [
            (shape, chunks, what)
            for shape in ("small", "odd")
            for chunks in (1, 2, 5)
            for what in (GATHER, SCATTER)
        ]
        for row in rows:
            assert 0 < row.worst <= row.ratio
            assert row.value > 0
            assert row.target == 0.6
        assert sum("moved by torch" in line for line in said) == 6

    def test_what_does_not_fit_is_left_out(self) -> None:
        said: list[str] = []
        room = 6 * 2 * SMALL.chunk_bytes
        rows = measured(SMALL, room=room, say=said.append)
        assert {row.chunks for row in rows} == {1, 2}
        assert not measured(SMALL, room=1000, say=said.append)
        assert any("left out: the GPU's memory is too small" in line for line in said)

    def test_turns_touch_different_memory(self) -> None:
        case = kernels.Case(SMALL, 4, CPU)
        turns = case.turns(2, cold_bytes=100 * MIB)
        assert len(turns) == 4  # of 8 chunks
        blocks = [block for ids, _, _ in turns for block in ids.ravel().tolist()]
        assert sorted(blocks) == list(range(case.num_blocks))
        assert len({staging.data_ptr() for _, staging, _ in turns}) == 2
        ends = [source + 2 * SMALL.chunk_bytes for _, _, source in turns]
        assert max(ends) <= case.cache.numel()

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
    def test_rows_of_transfers(self, engine: Engine) -> None:
        rows = transfers.measure(engine, Options(rounds=2, retrieves=5), print)
        assert [row.what for row in rows] == [STORE, RETRIEVE, RETRIEVE_P50, RETRIEVE_P99]
        assert [row.target for row in rows] == [0.9, 0.9, None, None]
        assert [row.rounds for row in rows] == [2, 2, 5, 5]
        p50, p99 = rows[2:]
        assert 0 < p50.value <= p99.value
        assert p99.worst >= p99.ratio

    def test_other_bytes_than_were_stored_are_found(self, engine: Engine) -> None:
        _, hashes = engine.store()
        engine.retrieve(hashes)
        engine.check()
        engine.memory[2, engine.target_blocks[-1], -1] ^= 1
        with pytest.raises(EngineFailed, match="layer 2: other bytes"):
            engine.check()

    def test_steps_with_and_without_stores(self, engine: Engine) -> None:
        plan = Options(rounds=2, seconds=0.1, layers=2, width=64, batch=4)
        (row,) = decode.measure(engine, plan, print)
        assert row.what == DECODE
        assert row.target == 1.02
        assert row.unit == "ms"
        assert 0 < row.ratio <= row.worst
        assert "stores at " in row.case


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


@pytest.mark.servers
@pytest.mark.parametrize(
    ("words", "taught"),
    [
        (["--help"], ["data-plane", "lookup", "recovery", "gateway", "gpu", "main-job"]),
        (["gpu", "--help"], ["scripts/bench gpu", "--parts", "at least 85 %"]),
    ],
)
def test_the_command_line_teaches_it(words: list[str], taught: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", *words]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [word for word in taught if word not in done.stdout] == []


class TestWithoutAGpu:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_one_sentence_says_what_is_needed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["gpu", "--quick"]) == 1
        assert "needs an NVIDIA GPU, and a torch that is built for CUDA" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("cuda", "said"), [(None, "is built without CUDA"), ("13.0", "sees no GPU")]
    )
    def test_it_says_which(
        self, cuda: str | None, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(run.NoGpu, match=said):
            run.find_gpu()


@pytest.mark.parametrize("rows", [[], [a_row(), a_row(what=DECODE, unit="ms", target=1.02)]])
def test_a_plot_of_what_there_is(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_plot(tmp_path / "deep" / "plot.png", rows, "a machine").stat().st_size > 1000
