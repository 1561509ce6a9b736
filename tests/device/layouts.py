# SPDX-License-Identifier: Apache-2.0
"""Random layouts over real bytes, and a reference gather and scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lmcache_redis.device.calls import ChunkCopy, CopyCall, DeviceContext
from lmcache_redis.device.layout import KVLayout, Segment, coalesce

BLANK = 0xA5  # each byte of an empty slot


@dataclass
class Paged:
    """A layout, and storages of random bytes that it fits."""

    layout: KVLayout
    storages: list[np.ndarray]

    def chunk(self, block_ids: Sequence[int], skip_blocks: int = 0) -> bytes:
        """The chunk in those blocks, byte by byte as `lmcache_redis.device.calls` defines it.

        The pages of the first few blocks are `BLANK`.
        """
        return b"".join(
            self.storages[s.storage][begin : begin + s.page_bytes].tobytes()
            if number >= skip_blocks
            else bytes([BLANK]) * s.page_bytes
            for s in self.layout.segments
            for number, begin in enumerate(s.offset + block * s.block_stride for block in block_ids)
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
        segments=coalesce(segments)[0] if draw(st.booleans()) else tuple(segments),
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


def one(
    block_ids: Sequence[int], slots: Sequence[memoryview], skip: int = 0, **more: Any
) -> CopyCall:
    """A call of one chunk. more: fields of `CopyCall`."""
    return CopyCall([ChunkCopy(block_ids, slots, skip)], **more)


@dataclass
class Call:
    """Chunks of one length; ``skip_blocks`` counts from the first. stripe: as in `stripe_sizes`."""

    case: Paged
    chunks: list[list[int]]
    stripe: int
    skip_blocks: int

    @property
    def chunk_bytes(self) -> int:
        return len(self.chunks[0]) * self.case.layout.block_bytes

    def empty_slots(self) -> list[memoryview]:
        """As `empty_slots`, of all chunks."""
        return [slot for _ in self.chunks for slot in empty_slots(self.chunk_bytes, self.stripe)]

    def filled_slots(self, chunks: Sequence[bytes]) -> list[memoryview]:
        """As `filled_slots`, of all chunks."""
        return [slot for chunk in chunks for slot in filled_slots(chunk, self.stripe)]

    def over(self, slots: Sequence[memoryview], skip_blocks: int = 0) -> CopyCall:
        """The call with slots, those of the first chunk first."""
        each = len(slots) // len(self.chunks)
        chunks = [
            ChunkCopy(ids, slots[n * each : (n + 1) * each], self.skip_of(n, skip_blocks))
            for n, ids in enumerate(self.chunks)
        ]
        return CopyCall(chunks)

    def skip_of(self, number: int, skip_blocks: int) -> int:
        """The blocks to skip in one of the chunks."""
        length = len(self.chunks[0])
        return min(max(0, skip_blocks - number * length), length)

    def gathered(self) -> list[bytes]:
        return [self.case.chunk(chunk) for chunk in self.chunks]

    def scattered(self, chunks: Sequence[bytes]) -> list[np.ndarray]:
        """The storages once those chunks are in their blocks."""
        after = self.case.storages
        for number, (ids, chunk) in enumerate(zip(self.chunks, chunks, strict=True)):
            skip = self.skip_of(number, self.skip_blocks)
            after = Paged(self.case.layout, after).with_chunk(ids, chunk, skip)
        return after


@st.composite
def calls(draw: st.DrawFn, granule: int = 1, device: str = "cpu") -> Call:
    """One to three chunks of a random layout, in blocks that differ."""
    case = draw(paged(granule, device))
    num_blocks = case.layout.num_blocks
    count = draw(st.integers(1, min(3, num_blocks)))
    length = draw(st.integers(1, num_blocks // count))
    order = draw(st.permutations(range(num_blocks)))
    chunks = [list(order[n * length : (n + 1) * length]) for n in range(count)]
    return Call(case, chunks, draw(st.integers(1, 700)), draw(st.integers(0, count * length)))


def check_call(
    device: DeviceContext, call: Call, memory: Callable[[], list[np.ndarray]] | None = None
) -> None:
    """Both directions, against the reference gather and scatter; every byte is compared.

    memory: the device's storages as they are, where they are not the case's own.
    """
    case = call.case
    slots = call.empty_slots()
    device.gather(call.over(slots))
    want = call.filled_slots(call.gathered())
    assert [bytes(slot) for slot in slots] == [bytes(slot) for slot in want]
    random = np.random.default_rng(call.stripe)
    chunks = [random.bytes(call.chunk_bytes) for _ in call.chunks]
    expected = call.scattered(chunks)
    slots = call.filled_slots(chunks)
    device.scatter(call.over(slots, call.skip_blocks))
    storages = case.storages if memory is None else memory()
    assert all(np.array_equal(*pair) for pair in zip(expected, storages, strict=True))


def stripe_sizes(chunk_bytes: int, stripe: int) -> list[int]:
    """Of a chunk in shares: two stripes of that size, then one of half of it, and so on."""
    sizes: list[int] = []
    while (left := chunk_bytes - sum(sizes)) > 0:
        sizes.append(min(left, stripe if len(sizes) % 3 < 2 else -(-stripe // 2)))
    return sizes


def empty_slots(chunk_bytes: int, stripe: int) -> list[memoryview]:
    """Slots for a chunk, all bytes `BLANK`."""
    sizes = stripe_sizes(chunk_bytes, stripe)
    return [memoryview(bytearray([BLANK]) * size) for size in sizes]


def filled_slots(chunk: bytes, stripe: int) -> list[memoryview]:
    """Slots that hold a chunk."""
    slots, at = empty_slots(len(chunk), stripe), 0
    for slot in slots:
        slot[:] = chunk[at : at + len(slot)]
        at += len(slot)
    return slots
