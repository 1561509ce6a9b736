"""What there is to copy with on a GPU, and the benchmark's reference against that of the tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given

from benchmarks.gpu.reference import ReferenceCopies
from lmcache_redis.device.cuda_copies import page_copies
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.moves import Move, check_gather, check_scatter, moves

LAYOUT = KVLayout((), "uint8", "cuda", 16, 4, (Segment(0, 0, 8, 8),))
KERNELS = "lmcache_redis.device.cuda_kernels"


@given(moves(unique=False, skip=True))
def test_the_reference_gathers(move: Move) -> None:
    check_gather(ReferenceCopies, move)


@given(moves(unique=True, skip=True))
def test_the_reference_scatters(move: Move) -> None:
    check_scatter(ReferenceCopies, move)


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    with pytest.raises(DeviceError, match=r"cannot be imported .*: pip install triton"):
        page_copies(LAYOUT, [torch.zeros(32, dtype=torch.uint8)])


class Kernels:
    """In place of the module with the kernels."""

    class TritonCopies:
        failure: Exception | None = None

        def __init__(self, table: Any, device: torch.device) -> None:
            assert device.type == "cpu"
            self.warm = False

        def warm_up(self) -> None:
            if self.failure is not None:
                raise self.failure
            self.warm = True


def test_a_kernel_that_cannot_be_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C compiler: the message says what to install."""
    failure = RuntimeError("Failed to find C compiler\nand so on")
    monkeypatch.setattr(Kernels.TritonCopies, "failure", failure)
    monkeypatch.setitem(sys.modules, KERNELS, Kernels)  # type: ignore[arg-type]
    with pytest.raises(
        DeviceError, match=r"\(RuntimeError: Failed to find C compiler\): it needs .*gcc"
    ):
        page_copies(LAYOUT, [torch.zeros(32, dtype=torch.uint8)])


def test_kernels_have_run_before_a_chunk_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KERNELS, Kernels)  # type: ignore[arg-type]
    copies: Any = page_copies(LAYOUT, [torch.zeros(32, dtype=torch.uint8)])
    assert isinstance(copies, Kernels.TritonCopies)
    assert copies.warm


def test_a_layout_that_leaves_its_storage_is_refused() -> None:
    with pytest.raises(DeviceError, match="ends at byte 32"):
        page_copies(LAYOUT, [torch.zeros(31, dtype=torch.uint8)])
