"""How a chunk is gathered on a GPU: segments in batches, one copy kernel each. Pure.

A batch is a run of segments (in chunk order) that lie in one storage at equal distances, with
equal pages and strides: all layers of most KV caches. Its pages form one strided array
``[segment, block, element]``, out of which the chunk's blocks are selected; the selection,
written contiguously, is exactly the batch's part of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lmcache_redis.device.layout import KVLayout, Segment

_ELEMENT_BYTES = (8, 4, 2, 1)


class Batch(NamedTuple):
    """Segments ``segment_step`` bytes apart, moved as elements of ``element_bytes``.

    ``bytes_before`` counts the page bytes of all earlier batches in one block: the batch's
    part of a chunk of ``n`` blocks begins at ``n * bytes_before``.
    """

    storage: int
    offset: int
    segment_count: int
    segment_step: int
    page_bytes: int
    block_stride: int
    bytes_before: int
    element_bytes: int


def plan_batches(layout: KVLayout, addresses: Sequence[int]) -> list[Batch]:
    """The layout's segments as batches, in chunk order.

    Args:
        layout: has passed `KVLayout.check`.
        addresses: where each storage begins; decides how wide its elements may be.
    """
    batches: list[Batch] = []
    bytes_before = 0
    for segment in layout.segments:
        step = _step_to(segment, batches[-1]) if batches else None
        if step is None:
            batches.append(
                Batch(
                    storage=segment.storage,
                    offset=segment.offset,
                    segment_count=1,
                    segment_step=0,
                    page_bytes=segment.page_bytes,
                    block_stride=segment.block_stride,
                    bytes_before=bytes_before,
                    element_bytes=1,
                )
            )
        else:
            grown = batches[-1].segment_count + 1
            batches[-1] = batches[-1]._replace(segment_count=grown, segment_step=step)
        bytes_before += segment.page_bytes
    return [
        batch._replace(element_bytes=_element_bytes(batch, addresses[batch.storage]))
        for batch in batches
    ]


def _step_to(segment: Segment, batch: Batch) -> int | None:
    """The batch's step if the segment continues it, else None."""
    end = batch.offset + (batch.segment_count - 1) * batch.segment_step
    step = segment.offset - end
    alike = (
        segment.storage == batch.storage
        and segment.page_bytes == batch.page_bytes
        and segment.block_stride == batch.block_stride
    )
    continues = step == batch.segment_step or batch.segment_count == 1
    return step if alike and continues and step > 0 else None


def _element_bytes(batch: Batch, address: int) -> int:
    """The widest element at which all of the batch is aligned, in its storage and in staging."""
    parts = (
        address,
        batch.offset,
        batch.segment_step,
        batch.page_bytes,
        batch.block_stride,
        batch.bytes_before,
    )
    return next(size for size in _ELEMENT_BYTES if all(part % size == 0 for part in parts))
