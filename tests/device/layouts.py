"""Random layouts over real bytes, and the plainest gather and scatter there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from lmcache_redis.device.layout import KVLayout, Segment, coalesce


@dataclass
class Paged:
    """A layout, and storages of random bytes that it fits."""

    layout: KVLayout
    storages: list[np.ndarray]

    def chunk(self, block_ids: Sequence[int]) -> bytes:
        """The chunk in those blocks, byte by byte as `lmcache_redis.device.plan` defines it."""
        return b"".join(
            self.storages[s.storage][begin : begin + s.page_bytes].tobytes()
            for s in self.layout.segments
            for begin in (s.offset + block * s.block_stride for block in block_ids)
        )

    def with_chunk(
        self, block_ids: Sequence[int], chunk: bytes, skip_blocks: int
    ) -> list[np.ndarray]:
        """The storages after that chunk was put into those blocks but for the first few."""
        after = [storage.copy() for storage in self.storages]
        at = 0
        for s in self.layout.segments:
            for index, block in enumerate(block_ids):
                if index >= skip_blocks:
                    begin = s.offset + block * s.block_stride
                    page = np.frombuffer(chunk[at : at + s.page_bytes], np.uint8)
                    after[s.storage][begin : begin + s.page_bytes] = page
                at += s.page_bytes
        return after

    @property
    def sizes(self) -> list[int]:
        return [storage.size for storage in self.storages]


@st.composite
def paged(draw: st.DrawFn, granule: int = 1, device: str = "cpu") -> Paged:
    """Storages cut into groups of segments that share blocks, with padding anywhere.

    One segment a group is a layer-outermost layout (two alike: K and V apart); several are a
    packed, block-outermost one. Sizes are multiples of ``granule`` bytes.
    """
    num_blocks = draw(st.integers(1, 9))
    padding = st.integers(0, 3).map(lambda n: n * granule)
    page = st.integers(1, 12).map(lambda n: n * granule)
    segments: list[Segment] = []
    sizes: list[int] = []
    for storage in range(draw(st.integers(1, 3))):
        end = draw(padding)
        for _ in range(draw(st.integers(1, 3))):
            pages = draw(st.lists(page, min_size=1, max_size=3))
            if draw(st.booleans()):
                pages = [pages[0]] * len(pages)
            gaps = [draw(padding) for _ in pages]
            block_stride = sum(pages) + sum(gaps)
            inside = 0
            for page_bytes, gap in zip(pages, gaps, strict=True):
                segments.append(Segment(storage, end + inside, page_bytes, block_stride))
                inside += page_bytes + gap
            end += num_blocks * block_stride
        sizes.append(end + draw(padding))
    segments = draw(st.permutations(segments)) if draw(st.booleans()) else segments
    layout = KVLayout(
        identity=(),
        dtype="uint8",
        device=device,
        block_size_tokens=16,
        num_blocks=num_blocks,
        segments=coalesce(segments) if draw(st.booleans()) else tuple(segments),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Paged(layout, [random.integers(0, 256, size, dtype=np.uint8) for size in sizes])


@st.composite
def blocks_of(draw: st.DrawFn, num_blocks: int, *, unique: bool = False) -> list[int]:
    """Block ids of a chunk: runs up, runs down, scattered, and (unless unique) repeated."""
    low = draw(st.integers(0, num_blocks - 1))
    high = draw(st.integers(low, num_blocks - 1))
    run = list(range(low, high + 1))
    kind = draw(st.sampled_from(["run", "reversed", "any"]))
    if kind == "any":
        return draw(
            st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=10, unique=unique)
        )
    return run if kind == "run" else run[::-1]


def empty_slots(chunk_bytes: int, stripe_payload_bytes: int, spare: int = 0) -> list[memoryview]:
    """Slots for a chunk, all bytes 0xA5, each ``spare`` bytes longer than its stripe."""
    lengths = [
        min(stripe_payload_bytes, chunk_bytes - begin)
        for begin in range(0, chunk_bytes, stripe_payload_bytes)
    ]
    return [memoryview(bytearray(b"\xa5" * (length + spare))) for length in lengths]


def filled_slots(chunk: bytes, stripe_payload_bytes: int, spare: int = 0) -> list[memoryview]:
    """Slots that hold a chunk."""
    slots = empty_slots(len(chunk), stripe_payload_bytes, spare)
    for index, slot in enumerate(slots):
        begin = index * stripe_payload_bytes
        stripe = chunk[begin : begin + stripe_payload_bytes]
        slot[: len(stripe)] = stripe
    return slots
