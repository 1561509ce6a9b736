"""Batches of segments that lie alike; what torch does with them is in `test_cuda_copies`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.staging import Batch, plan_batches
from tests.device.layouts import Paged, paged

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


def layout(*segments: Segment) -> KVLayout:
    return KVLayout((), "uint8", "cuda", 16, 10, segments)


class TestBatches:
    def test_all_layers_of_one_storage_are_one(self) -> None:
        layers = [Segment(0, 640 * n, 64, 64) for n in range(32)]
        assert plan_batches(layout(*layers), [512]) == [Batch(0, 0, 32, 640, 64, 64, 0, 8)]

    def test_a_storage_a_layer_is_a_batch_a_layer(self) -> None:
        layers = [Segment(n, 0, 64, 64) for n in range(3)]
        batches = plan_batches(layout(*layers), [0, 512, 1024])
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
            batches = plan_batches(layout(first, second, other), [0, 0])
            assert [batch.segment_count for batch in batches] == [2, 1]

    def test_elements_are_as_wide_as_everything_is_aligned(self) -> None:
        for address, segment, width in (
            (0, Segment(0, 0, 64, 64), 8),
            (4, Segment(0, 0, 64, 64), 4),
            (0, Segment(0, 12, 64, 64), 4),
            (0, Segment(0, 0, 6, 64), 2),
            (0, Segment(0, 0, 64, 65), 1),
        ):
            assert plan_batches(layout(segment), [address])[0].element_bytes == width
        odd = layout(Segment(0, 0, 2, 64), Segment(0, 64, 64, 64))
        assert [batch.element_bytes for batch in plan_batches(odd, [0])] == [2, 2]
