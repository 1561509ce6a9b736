"""The fallback against the reference on CPU tensors, and the choice between it and Triton."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device import cuda_copies
from lmcache_redis.device.cuda_copies import Batch, IndexedCopies, page_copies, plan_batches
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.layouts import Paged, paged
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


GRANULES = st.sampled_from([1, 2, 8])


@given(GRANULES.flatmap(paged))
def test_batches_are_the_segments_in_order(case: Paged) -> None:
    segments = []
    bytes_before = 0
    for batch in plan_batches(case.layout, [0] * len(case.storages)):
        assert batch.bytes_before == bytes_before
        for index in range(batch.segment_count):
            offset = batch.offset + index * batch.segment_step
            segments.append(Segment(batch.storage, offset, batch.page_bytes, batch.block_stride))
            bytes_before += batch.page_bytes
    assert tuple(segments) == case.layout.segments


def layout_of(*segments: Segment) -> KVLayout:
    return KVLayout((), "uint8", "cuda", 16, 10, segments)


class TestBatches:
    def test_all_layers_of_one_storage_are_one(self) -> None:
        layers = [Segment(0, 640 * n, 64, 64) for n in range(32)]
        assert plan_batches(layout_of(*layers), [512]) == [Batch(0, 0, 32, 640, 64, 64, 0, 8)]

    def test_a_storage_a_layer_is_a_batch_a_layer(self) -> None:
        layers = [Segment(n, 0, 64, 64) for n in range(3)]
        batches = plan_batches(layout_of(*layers), [0, 512, 1024])
        assert [batch.bytes_before for batch in batches] == [0, 64, 128]

    def test_what_breaks_a_batch(self) -> None:
        first, second = Segment(0, 0, 64, 64), Segment(0, 640, 64, 64)
        for other in (
            Segment(0, 1281, 64, 64),
            Segment(0, 1280, 32, 64),
            Segment(0, 1280, 64, 128),
            Segment(1, 1280, 64, 64),
            Segment(0, 0, 64, 64),
        ):
            batches = plan_batches(layout_of(first, second, other), [0, 0])
            assert [batch.segment_count for batch in batches] == [2, 1]

    def test_elements_are_as_wide_as_everything_is_aligned(self) -> None:
        for address, segment, width in (
            (0, Segment(0, 0, 64, 64), 8),
            (4, Segment(0, 0, 64, 64), 4),
            (0, Segment(0, 12, 64, 64), 4),
            (0, Segment(0, 0, 6, 64), 2),
            (0, Segment(0, 0, 64, 65), 1),
        ):
            assert plan_batches(layout_of(segment), [address])[0].element_bytes == width
        odd = layout_of(Segment(0, 0, 2, 64), Segment(0, 64, 64, 64))
        assert [batch.element_bytes for batch in plan_batches(odd, [0])] == [2, 2]
