# SPDX-License-Identifier: Apache-2.0
"""Checks gathers and scatters between pages and staging, byte by byte, on any device.

Storages and staging lie between guard bytes, and every byte there is compared afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from hypothesis import strategies as st

from lmcache_redis.device.blocks import find_segments, view_tensors
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import SegmentTable, Storage, pack_ids
from tests.device.layouts import BLANK, Paged, paged

GUARD_BYTES = 64
GUARD = 0xC3


class Copies(Protocol):
    """The kernels over one layout. ids: of `pack_ids`, on the device. staging: flat uint8 there."""

    def gather(self, ids: torch.Tensor, staging: torch.Tensor) -> None: ...

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor) -> None: ...


Make = Callable[[KVLayout, Sequence[torch.Tensor]], Copies]


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


def ids_of(move: Move, device: str = "cpu") -> torch.Tensor:
    packed = pack_ids(move.chunks, move.case.layout.num_blocks, move.skips)
    return torch.from_numpy(packed).to(device)


def table_over(layout: KVLayout, storages: Sequence[torch.Tensor], *units: int) -> SegmentTable:
    places = [Storage(storage.data_ptr(), storage.numel()) for storage in storages]
    return SegmentTable(layout, places, *units)


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
        want[at : at + move.chunk_bytes] = case.chunk(ids, skip)
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


BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 4, 8
NAMES = ("layer.0", "layer.1", "layer.2")


def memory(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Of random bytes."""
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def alike(*shape: int, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    return {name: memory(*shape, dtype=dtype) for name in NAMES}


def token_major() -> dict[str, torch.Tensor]:
    layers = alike(BLOCKS, TOKENS, HEADS, 2 * WIDTH)
    return {name: tensor.transpose(1, 2) for name, tensor in layers.items()}


def groups() -> dict[str, torch.Tensor]:
    small, large = BLOCKS * TOKENS * 4, BLOCKS * TOKENS * 24
    whole = memory(2 * small + large)
    return {
        "index.0": whole[:small].view(BLOCKS, TOKENS, 4),
        "layer.0": whole[small : small + large].view(BLOCKS, TOKENS, 24),
        "index.1": whole[small + large :].view(BLOCKS, TOKENS, 4),
    }


# KV caches as engines lay them out, scaled down.
KINDS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "k and v apart": lambda: alike(2, BLOCKS, TOKENS, HEADS, WIDTH),
    "k and v together": lambda: alike(BLOCKS, 2, TOKENS, HEADS, WIDTH),
    "head-major": lambda: alike(BLOCKS, HEADS, TOKENS, 2 * WIDTH),
    "token-major in memory, head-major to look at": token_major,
    "mla": lambda: alike(BLOCKS, TOKENS, 36),
    "fp8": lambda: alike(BLOCKS, TOKENS, HEADS, WIDTH, dtype=torch.float8_e4m3fn),
    "bytes of odd pages": lambda: alike(BLOCKS, TOKENS, 33, dtype=torch.uint8),
    "one storage, blocks outermost": lambda: dict(
        zip(NAMES, memory(BLOCKS, len(NAMES), TOKENS, HEADS, WIDTH).unbind(1), strict=True)
    ),
    "one storage, layers outermost": lambda: dict(
        zip(NAMES, memory(len(NAMES), BLOCKS, TOKENS, HEADS, WIDTH), strict=True)
    ),
    "groups of different pages in one storage": groups,
}


def check_engine(make: Make, kind: str) -> None:
    """Two chunks move to other blocks, in two launches; compared in the tensors' own terms."""
    tensors = KINDS[kind]()
    views, storages = view_tensors(tensors)
    segments, page_format, _ = find_segments(views, BLOCKS)
    layout = KVLayout((), "float16", "cuda", TOKENS, BLOCKS, segments, page_format)
    flat = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
    case = Paged(layout, [each.numpy() for each in flat])
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = make(layout, flat)
    out = Move(case, [[5, 1], [2, 5]], [0, 0], 0)
    back = Move(case, [[3, 0], [4, 1]], [0, 1], 0)
    staging = torch.full((2 * out.stride,), BLANK, dtype=torch.uint8)
    copies.gather(ids_of(out), staging)
    copies.scatter(ids_of(back), staging)
    moved = {3: 5, 0: 1, 1: 5}  # 4 is skipped
    for name, tensor in tensors.items():
        dim = 1 if kind == "k and v apart" else 0
        for block in range(BLOCKS):
            want = before[name].select(dim, moved.get(block, block))
            assert tensor.select(dim, block).view(torch.uint8).equal(want.view(torch.uint8))
