"""The Triton kernels: under the interpreter, as machine code for a GPU, and on one if there is one.

`tests.device.interpreted` and `tests.device.compiled` run in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lmcache_redis.device.cuda_copies import PageCopies, page_copies
from lmcache_redis.device.layout import KVLayout, Segment
from tests.device.layouts import Paged
from tests.device.moves import (
    Move,
    bytes_of,
    check_gather,
    check_scatter,
    guarded,
    ids_of,
    moves,
)

ROOT = Path(__file__).parents[2]

needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"
    ),
]


def run(words: Sequence[str], timeout_s: float, **environment: str) -> str:
    """Standard output of a Python process; its end where it fails."""
    done = subprocess.run(
        [sys.executable, *words],
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


@pytest.mark.servers
@pytest.mark.timeout(700)  # a minute on two idle cores
def test_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    words = ["-m", "pytest", "tests/device/interpreted.py", "-q", "-p", "no:cacheprovider"]
    output = run(words, 600, TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= 16, output
    assert "skipped" not in output, output


@pytest.mark.servers
def test_accesses_are_as_wide_as_the_table_says(tmp_path: Path) -> None:
    """Compiled for an H200, which takes no GPU: each unit is one load and one store."""
    pytest.importorskip("triton")
    words = ["-m", "tests.device.compiled"]
    output = run(words, 240, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = json.loads(output.splitlines()[-1])
    # A count of 1, or a multiple of 16, needs no new compilation.
    assert found["specializations"] == 1
    kernels = found["kernels"]
    kinds = {16: ".v4.b32", 8: ".v2.b32", 4: ".b32", 2: ".b16", 1: ".b8"}
    for kernel in kernels:
        # 512 units, 128 threads.
        want = {kinds[width]: 4 for width in kernel["widths"]}
        assert kernel["stores"] == want, kernel
        loads = {kind: kernel["loads"].get(kind) for kind in want}
        assert loads == want, kernel
        # The rest are the table's columns and block ids.
        assert set(kernel["loads"]) - set(want) == {".b64"}, kernel
        assert kernel["shared_bytes"] == kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= (32 if len(want) == 1 else 48), kernel
    assert {tuple(kernel["widths"]) for kernel in kernels} == {
        (16,), (8,), (4,), (2,), (1,), (16, 4), (16, 1),
    }  # fmt: skip


def chosen(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
    copies = page_copies(layout, storages)
    assert copies.name == "Triton"
    return copies


class TestOnAGpu:
    """The same cases as under the interpreter."""

    pytestmark = needs_gpu

    @settings(max_examples=100)
    @given(moves(unique=False, skip=True))
    def test_gather_equals_the_reference(self, move: Move) -> None:
        check_gather(chosen, move, "cuda")

    @settings(max_examples=100)
    @given(moves(unique=True, skip=True))
    def test_scatter_equals_the_reference(self, move: Move) -> None:
        check_scatter(chosen, move, "cuda")

    @pytest.mark.parametrize("page_bytes", [2048, 16384, 16384 + 16, 40_000, 73_728, 1001, 132])
    def test_pages_of_real_sizes(self, page_bytes: int) -> None:
        """8 layers, K and V apart; chunks of 16 blocks, three in a launch, with gaps between."""
        blocks, gap = 64, 48
        stride = page_bytes + gap
        segments = tuple(Segment(n, 0, page_bytes, stride) for n in range(16))
        layout = KVLayout((), "uint8", "cuda", 16, blocks, segments)
        random = np.random.default_rng(page_bytes)
        content = random.integers(0, 256, (16, blocks * stride), dtype=np.uint8)
        case = Paged(layout, list(content))
        ids = random.permutation(blocks)[:48].tolist()
        move = Move(case, [ids[:16], ids[16:32], ids[32:]], [0, 0, 5], 0)
        check_gather(chosen, move, "cuda")
        check_scatter(chosen, move, "cuda")

    def test_launches_of_other_sizes_need_no_new_compilation(self) -> None:
        """Counts of 1 and multiples of 16 are what Triton would specialise on."""
        from lmcache_redis.device import cuda_kernels

        storage = guarded(torch.zeros(512 * 64, dtype=torch.uint8).numpy(), "cuda")[1]
        layout = KVLayout((), "uint8", "cuda", 16, 512, (Segment(0, 0, 64, 64),))
        copies = chosen(layout, [storage])
        staging = torch.zeros(512 * 64, dtype=torch.uint8, device="cuda")
        case = Paged(layout, [storage.cpu().numpy()])

        def compiled() -> int:
            caches = cuda_kernels._move_chunks.device_caches.values()
            return sum(len(cache[0]) for cache in caches)

        copies.gather(ids_of(Move(case, [[0, 1]], [0], 0), "cuda"), staging)
        before = compiled()
        for n_blocks in (1, 3, 16, 17, 256):
            move = Move(case, [list(range(n_blocks))], [0], 0)
            copies.gather(ids_of(move, "cuda"), staging)
        assert compiled() == before

    def test_a_captured_launch_can_be_replayed(self) -> None:
        """As the benchmark times it: nothing on the way to a launch touches the host."""
        content = torch.arange(256, dtype=torch.uint8).repeat(64)
        storage = content.cuda()
        layout = KVLayout((), "uint8", "cuda", 16, 64, (Segment(0, 0, 256, 256),))
        copies = chosen(layout, [storage])
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
