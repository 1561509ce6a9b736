"""Checks gathers and scatters between pages and staging, byte by byte, on any device.

Storages and staging lie between guard bytes, and every byte there is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from lmcache_redis.device.cuda_copies import PageCopies
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import BlockIds, pack_ids
from tests.device.layouts import Paged, paged

GUARD_BYTES = 64
GUARD, BLANK = 0xC3, 0xA5

Make = Callable[[KVLayout, Sequence[torch.Tensor]], PageCopies]


@dataclass
class Move:
    """Chunks of one length, how many of each one's first blocks are skipped, and where memory lies.

    shift: by how many bytes the storages begin beyond an address that 64 divides.
    """

    case: Paged
    chunks: list[list[int]]
    skips: list[int]
    shift: int

    @property
    def chunk_bytes(self) -> int:
        return len(self.chunks[0]) * self.case.layout.block_bytes

    @property
    def stride(self) -> int:
        return -(-self.chunk_bytes // 16) * 16


@st.composite
def moves(
    draw: st.DrawFn, *, unique: bool, skip: bool, granules: Sequence[int] = (1, 2, 4, 8, 16)
) -> Move:
    """Layouts of random pages, padding and alignment; ids in runs, reversed, sparse, repeated."""
    granule = draw(st.sampled_from(granules))
    case = draw(paged(granule=granule, device="cuda"))
    num_blocks = case.layout.num_blocks
    count = draw(st.integers(1, min(3, num_blocks) if unique else 3))
    length = draw(st.integers(1, num_blocks // count if unique else 6))
    order = list(draw(st.permutations(range(num_blocks))))
    kind = draw(st.sampled_from(["run", "reversed", "sparse", "repeated"]))
    if kind == "run":
        order.sort()
    elif kind == "reversed":
        order.sort(reverse=True)
    if unique:
        chunks = [order[n * length : (n + 1) * length] for n in range(count)]
    elif kind == "repeated":
        ids = st.lists(st.integers(0, num_blocks - 1), min_size=length, max_size=length)
        chunks = [draw(ids) for _ in range(count)]
    else:
        chunks = [[order[(n + at) % num_blocks] for at in range(length)] for n in range(count)]
    skips = [draw(st.integers(0, length)) if skip else 0 for _ in chunks]
    shift = draw(st.sampled_from([0, 0, granule % 16, 1]))
    return Move(case, chunks, skips, shift)


def guarded(content: np.ndarray, device: str, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes on a device, ``shift`` beyond an aligned address: all around them, and they."""
    around = torch.full((content.size + 3 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
    begin = GUARD_BYTES - around.data_ptr() % GUARD_BYTES + shift
    inside = around[begin : begin + content.size]
    inside.copy_(torch.from_numpy(content))
    return around, inside


def expected(around: torch.Tensor, inside: torch.Tensor, content: bytes) -> bytes:
    """What ``around`` must hold once ``inside`` has that content."""
    begin = inside.data_ptr() - around.data_ptr()
    whole = bytearray([GUARD]) * around.numel()
    whole[begin : begin + inside.numel()] = content
    return bytes(whole)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def ids_of(move: Move, device: str) -> BlockIds:
    packed = pack_ids(move.chunks, move.case.layout.num_blocks, move.skips)
    return BlockIds(packed, torch.from_numpy(packed).to(device))


def check_gather(make: Make, move: Move, device: str = "cpu") -> None:
    """Staging holds the chunks but for skipped pages; everything else is as before."""
    case = move.case
    storages = [guarded(storage, device, move.shift) for storage in case.storages]
    copies = make(case.layout, [inside for _, inside in storages])
    size = (len(move.chunks) - 1) * move.stride + move.chunk_bytes
    around, staging = guarded(np.full(size, BLANK, np.uint8), device)
    copies.gather(ids_of(move, device), staging)

    want = bytearray([BLANK]) * size
    for number, (ids, skip) in enumerate(zip(move.chunks, move.skips, strict=True)):
        at = number * move.stride
        for s in case.layout.segments:
            for place, block in enumerate(ids):
                page = s.offset + block * s.block_stride
                if place >= skip:
                    want[at : at + s.page_bytes] = bytes(
                        case.storages[s.storage][page : page + s.page_bytes]
                    )
                at += s.page_bytes
    assert bytes_of(around) == expected(around, staging, bytes(want))
    for (outer, inner), content in zip(storages, case.storages, strict=True):
        assert bytes_of(outer) == expected(outer, inner, content.tobytes())


def check_scatter(make: Make, move: Move, device: str = "cpu") -> None:
    """Pages hold the chunks but for the first blocks; every other byte is as before."""
    case = move.case
    storages = [guarded(storage, device, move.shift) for storage in case.storages]
    copies = make(case.layout, [inside for _, inside in storages])
    size = (len(move.chunks) - 1) * move.stride + move.chunk_bytes
    chunk_bytes = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    around, staging = guarded(chunk_bytes, device)
    copies.scatter(ids_of(move, device), staging)

    after = case.storages
    for number, (ids, skip) in enumerate(zip(move.chunks, move.skips, strict=True)):
        chunk = chunk_bytes[number * move.stride :][: move.chunk_bytes].tobytes()
        after = Paged(case.layout, after).with_chunk(ids, chunk, skip)
    for (outer, inner), content in zip(storages, after, strict=True):
        assert bytes_of(outer) == expected(outer, inner, content.tobytes())
    assert bytes_of(around) == expected(around, staging, chunk_bytes.tobytes())
