# SPDX-License-Identifier: Apache-2.0
"""The kernels: their text read, compiled by ptxas and run on the CPU; their source interpreted; and
on a GPU if there is one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.launches import KernelCopies
from lmcache_redis.device import kernels, table
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.layouts import Paged
from tests.device.moves import (
    KINDS,
    Move,
    bytes_of,
    check_engine,
    check_gather,
    check_scatter,
    ids_of,
    moves,
)
from tests.device.ptx import Fault, Kernel, PtxCopies

ROOT = Path(__file__).parents[2]
COMPILE = ROOT / "lmcache_redis" / "device" / "kernels" / "compile.py"
TILES = st.sampled_from([4, 16, 64, 512])

each_kernel = pytest.mark.parametrize("name", kernels.NAMES)
needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"
    ),
]


def run(words: Sequence[object], timeout_s: float = 60, **environment: str) -> str:
    """All that a program prints; its end where it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.long  # `TestBuild` says that the text is made of this source
@pytest.mark.servers
@pytest.mark.timeout(700)  # a minute on two idle cores
def test_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    words = ["-m", "pytest", "tests/device/interpreted.py", "-q", "-p", "no:cacheprovider"]
    output = run([sys.executable, *words], 600, TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) == 2 + len(KINDS), output
    assert "skipped" not in output, output


class TestText:
    @each_kernel
    def test_the_entry_takes_five_numbers_of_64_bits(self, name: str) -> None:
        text = kernels.text(name).decode()
        assert re.findall(r"^\.(?:version|target|address_size) .*", text, re.MULTILINE) == [
            ".version 8.0", ".target sm_80", ".address_size 64",
        ]  # fmt: skip
        assert re.findall(r"\.entry (\w+)\(", text) == [name]
        assert re.findall(r"\.param \.(\w+) ", text) == ["u64"] * 5
        assert re.findall(r"\.reqntid (.*)", text) == [str(kernels.THREADS)]
        assert ".shared" not in text
        assert ".local" not in text

    @each_kernel
    def test_each_unit_is_one_load_and_one_store(self, name: str) -> None:
        text = kernels.text(name).decode()
        kinds = {16: ".v4.b32", 8: ".v2.b32", 4: ".b32", 2: ".b16", 1: ".b8"}
        kind = kinds[int(name.partition("_")[2])]
        a_thread = table.UNITS_PER_TILE // kernels.THREADS
        loads = Counter(re.findall(r"ld\.global(\.\S+)", text))
        assert Counter(re.findall(r"st\.global(\.\S+)", text)) == {kind: a_thread}
        # The rest are the table's columns and block ids.
        assert loads == {kind: a_thread, ".b64": len(table.COLUMNS) + a_thread}

    @each_kernel
    def test_it_names_what_made_it_and_no_file(self, name: str) -> None:
        first, text = kernels.text(name).decode().split("\n", 1)
        assert re.fullmatch(r"// Triton [\d.]+\S*, source [0-9a-f]{64}", first)
        assert "/" not in text
        assert "debug" not in text

    def test_what_is_missing_is_said(self) -> None:
        with pytest.raises(DeviceError, match=r"need the kernel gather_3, which .* reinstall"):
            kernels.text("gather_3")


@pytest.mark.servers
class TestBuild:
    def test_the_package_has_what_the_source_gives(self, tmp_path: Path) -> None:
        """If this fails in a checkout, its kernels are old: `pip install -e .` makes them.

        Only what is not current is made again.
        """
        pytest.importorskip("triton")
        run([sys.executable, COMPILE, tmp_path])
        made = {file.stem: file.read_bytes() for file in tmp_path.iterdir()}
        assert made == {name: kernels.text(name) for name in kernels.NAMES}
        first, second = (tmp_path / f"{name}.ptx" for name in kernels.NAMES[:2])
        before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        right = first.read_bytes()
        first.write_text("// Triton 3.6.0, source 0\n")
        second.unlink()
        run([sys.executable, COMPILE, tmp_path])
        assert first.read_bytes() == right
        after = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        assert {file for file in before if before[file] != after[file]} == {first, second}

    @pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
    def test_gpus_old_and_new_take_it(self, gpu: str, tmp_path: Path) -> None:
        """NVIDIA's own compiler, as the driver has it: no kernel spills, and all fit often."""
        found = importlib.util.find_spec("triton")
        if found is None or found.origin is None:
            pytest.skip("ptxas is in triton, which is not installed")
        ptxas = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        for name in kernels.NAMES:
            file = tmp_path / f"{name}.ptx"
            file.write_bytes(kernels.text(name))
            words = ["--verbose", f"--gpu-name={gpu}", file, "--output-file", tmp_path / "cubin"]
            said = run([ptxas, *words])
            registers = re.search(r"Used (\d+) registers", said)
            assert registers is not None, said
            assert int(registers[1]) <= 40, said
            stack = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
            assert stack in said
            assert "smem" not in said


class TestOnTheCpu:
    """The text that a GPU gets, with `tests.device.ptx` in place of the GPU."""

    @settings(max_examples=50)
    @given(moves(unique=False, skip=True), TILES)
    def test_gather_equals_the_reference(self, move: Move, units: int) -> None:
        check_gather(functools.partial(PtxCopies, units=units), move)

    @settings(max_examples=50)
    @given(moves(unique=True, skip=True), TILES)
    def test_scatter_equals_the_reference(self, move: Move, units: int) -> None:
        check_scatter(functools.partial(PtxCopies, units=units), move)

    @pytest.mark.parametrize("kind", KINDS)
    def test_layouts_of_engines(self, kind: str) -> None:
        check_engine(PtxCopies, kind)

    @pytest.mark.parametrize("page_bytes", [2048, 16384 + 16, 40_000, 1001, 132])
    def test_pages_of_real_sizes(self, page_bytes: int) -> None:
        move = move_of_pages(page_bytes, layers=2)
        check_gather(PtxCopies, move)
        check_scatter(PtxCopies, move)

    @pytest.mark.parametrize(
        ("instruction", "said"),
        [
            ("ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 4 ];", "8 bytes that is not aligned"),
            ("ld.global.b64 { %rd2 }, [ %rd1 + 64 ];", "3 accesses outside the memory"),
            ("st.global.b8 [ %rd1 + -1 ], { %r0 };", "3 accesses outside the memory"),
            ("shr.b32 %r1, %r0, 1;", r"shr\.b32 is not known"),
        ],
    )
    def test_what_a_gpu_would_not_run(self, instruction: str, said: str) -> None:
        memory = np.zeros(64 + 8, np.uint8)
        memory = memory[-memory.ctypes.data % 8 :][:64]
        text = (
            f"(.param .u64 p_0)\n{{\nmov.u32 %r0, %tid.x;\nld.param.b64 %rd1, [p_0];\n{instruction}"
        )
        with pytest.raises(Fault, match=said):
            Kernel(text, [memory]).run((1, 1), 3, [memory.ctypes.data])


def move_of_pages(page_bytes: int, layers: int) -> Move:
    """K and V apart; chunks of 16 blocks, three in a launch, with gaps between the pages."""
    blocks, gap = 64, 48
    stride = page_bytes + gap
    segments = tuple(Segment(n, 0, page_bytes, stride) for n in range(2 * layers))
    layout = KVLayout((), "uint8", "cuda", 16, blocks, segments)
    random = np.random.default_rng(page_bytes)
    content = random.integers(0, 256, (2 * layers, blocks * stride), dtype=np.uint8)
    ids = random.permutation(blocks)[:48].tolist()
    chunks = [ids[:16], ids[16:32], ids[32:]]
    return Move(Paged(layout, list(content)), chunks, [0, 0, 5], 0)


class TestOnAGpu:
    """The same, launched by the driver."""

    pytestmark = needs_gpu

    @settings(max_examples=100)
    @given(moves(unique=False, skip=True))
    def test_gather_equals_the_reference(self, move: Move) -> None:
        check_gather(KernelCopies, move, "cuda")

    @settings(max_examples=100)
    @given(moves(unique=True, skip=True))
    def test_scatter_equals_the_reference(self, move: Move) -> None:
        check_scatter(KernelCopies, move, "cuda")

    @pytest.mark.parametrize("page_bytes", [2048, 16384, 16384 + 16, 40_000, 73_728, 1001, 132])
    def test_pages_of_real_sizes(self, page_bytes: int) -> None:
        move = move_of_pages(page_bytes, layers=8)
        check_gather(KernelCopies, move, "cuda")
        check_scatter(KernelCopies, move, "cuda")

    def test_a_captured_launch_can_be_replayed(self) -> None:
        """As the benchmark times it: nothing on the way to a launch touches the host."""
        content = torch.arange(256, dtype=torch.uint8).repeat(64)
        storage = content.cuda()
        layout = KVLayout((), "uint8", "cuda", 16, 64, (Segment(0, 0, 256, 256),))
        copies = KernelCopies(layout, [storage])
        ids = ids_of(Move(Paged(layout, [content.numpy()]), [[3, 9]], [0], 0), "cuda")
        staging = torch.zeros(512, dtype=torch.uint8, device="cuda")
        copies.gather(ids, staging)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copies.gather(ids, staging)
        staging.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bytes_of(staging) == bytes_of(content[:512])
