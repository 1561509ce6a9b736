"""The fallback against the reference on CPU tensors, and the choice between it and Triton."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given

from lmcache_redis.device import cuda_copies
from lmcache_redis.device.cuda_copies import page_copies
from lmcache_redis.device.cuda_fallback import IndexedCopies
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.moves import Move, check_gather, check_scatter, moves

LAYOUT = KVLayout((), "uint8", "cuda", 16, 4, (Segment(0, 0, 8, 8),))
KERNELS = "lmcache_redis.device.cuda_kernels"


@given(moves(unique=False, skip=True))
def test_the_fallback_gathers_as_the_reference(move: Move) -> None:
    check_gather(IndexedCopies, move)


@given(moves(unique=True, skip=True))
def test_the_fallback_scatters_as_the_reference(move: Move) -> None:
    check_scatter(IndexedCopies, move)


class TestChoice:
    @pytest.fixture(autouse=True)
    def _nothing_said_yet(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> Iterator[None]:
        cuda_copies._log_once.cache_clear()
        monkeypatch.delitem(sys.modules, KERNELS, raising=False)
        caplog.set_level(logging.INFO, logger=cuda_copies.__name__)
        yield
        cuda_copies._log_once.cache_clear()

    def test_without_triton_it_is_the_fallback_and_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
        storage = torch.zeros(32, dtype=torch.uint8)
        for _ in range(3):
            assert isinstance(page_copies(LAYOUT, [storage]), IndexedCopies)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "by torch alone" in record.message
        assert "Triton cannot be imported" in record.message

    def test_where_triton_cannot_build_a_kernel_it_is_the_fallback(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As on a machine without a C compiler."""

        class Kernels:
            class TritonCopies:
                def __init__(self, *_: Any) -> None: ...

                def warm_up(self) -> None:
                    raise RuntimeError("Failed to find C compiler\nand so on")

        monkeypatch.setitem(sys.modules, KERNELS, Kernels)  # type: ignore[arg-type]
        storage = torch.zeros(32, dtype=torch.uint8)
        for _ in range(3):
            assert isinstance(page_copies(LAYOUT, [storage]), IndexedCopies)
        (record,) = caplog.records
        assert "a kernel (RuntimeError: Failed to find C compiler)" in record.message

    def test_where_triton_works_it_is_chosen_and_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        warmed: list[Any] = []

        class Kernels:
            class TritonCopies:
                def __init__(self, table: Any, device: torch.device) -> None:
                    assert device.type == "cpu"

                def warm_up(self) -> None:
                    warmed.append(self)

        monkeypatch.setitem(sys.modules, KERNELS, Kernels)  # type: ignore[arg-type]
        storage = torch.zeros(32, dtype=torch.uint8)
        chosen = [page_copies(LAYOUT, [storage]) for _ in range(3)]
        assert chosen == warmed
        assert [record.levelno for record in caplog.records] == [logging.INFO]
        assert "Triton kernels" in caplog.text

    def test_a_layout_that_leaves_its_storage_is_refused(self) -> None:
        with pytest.raises(DeviceError, match="ends at byte 32"):
            page_copies(LAYOUT, [torch.zeros(31, dtype=torch.uint8)])
