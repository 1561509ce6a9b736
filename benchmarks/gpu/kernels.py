# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter: random blocks of a paged KV cache to staging, and back.

The reference is a device copy of the same bytes, timed in the same round and in the same way.
``of_peak`` compares with a copy of gibibytes, which a launch of a few megabytes cannot reach.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.engine import Shape
from benchmarks.gpu.rows import GATHER, MIB, SCATTER, Options, Row, row_of
from benchmarks.gpu.timing import Launch, Measure, captured, wait_for_all
from benchmarks.report import rotated
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.table import pack_ids, staging_stride_bytes
from lmcache_redis.errors import LMCacheRedisError

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.launches import KernelCopies
    from benchmarks.gpu.reference import ReferenceCopies

_COPIES = 6  # of the bytes moved: a cache of two, staging, and the same again for the check


class WrongBytes(LMCacheRedisError):
    """A kernel that was to be timed copies wrong bytes."""


def measure(
    options: Options, device: torch.device, room_bytes: int, say: Callable[[str], None]
) -> list[Row]:
    """Two rows for each shape and count of chunks. Raises WrongBytes.

    room_bytes: GPU memory for cache and staging.
    """
    peak_bytes = min(options.peak_bytes, room_bytes // 2)
    peak = _peak(peak_bytes, options.rounds, device)
    say(f"device copy, {peak_bytes // MIB} MiB: {peak:.0f} GB/s read and written")
    rows: list[Row] = []
    for shape in options.shapes:
        most = room_bytes // (_COPIES * shape.chunk_bytes)
        counts = [n for n in options.chunk_counts if n <= most]
        if not counts:
            say(f"{shape.name}: left out: the GPU's memory is too small")
            continue
        case = Case(shape, max(counts), device)
        for chunks in counts:
            size = f"{chunks * shape.chunk_bytes // MIB} MiB"
            say(f"{shape.name}, {chunks} chunks ({size}), moved by {case.copies.name}")
            rows += _measure_one(case, chunks, options, peak)
        del case  # before the next one takes its memory
    return rows


class Case:
    """A paged KV cache of random bytes for twice as many chunks as are moved, and staging."""

    def __init__(self, shape: Shape, most_chunks: int, device: torch.device) -> None:
        import torch

        from benchmarks.gpu.launches import KernelCopies
        from benchmarks.gpu.reference import ReferenceCopies

        self.shape = shape
        self.device = device
        self.pool_chunks = 2 * most_chunks
        self.num_blocks = self.pool_chunks * shape.blocks_per_chunk
        segment_bytes = self.num_blocks * shape.page_bytes
        self.cache = torch.randint(
            0, 256, (shape.segments * segment_bytes,), dtype=torch.uint8, device=device
        )
        self.stride = staging_stride_bytes(shape.chunk_bytes)
        self.most_chunks = most_chunks
        self.staging = torch.zeros(most_chunks * self.stride, dtype=torch.uint8, device=device)
        segments = tuple(
            Segment(0, n * segment_bytes, shape.page_bytes, shape.page_bytes)
            for n in range(shape.segments)
        )
        self.layout = KVLayout((), "uint8", "cuda", shape.block_tokens, self.num_blocks, segments)
        self.copies: KernelCopies | ReferenceCopies = KernelCopies(self.layout, [self.cache])
        self.reference = ReferenceCopies(self.layout, [self.cache])
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1))
        self._chunks = order.view(self.pool_chunks, shape.blocks_per_chunk).tolist()

    def ids(self, begin: int, chunks: int) -> torch.Tensor:
        """The block ids of ``chunks`` chunks in random order, from ``begin`` on."""
        import torch

        packed = pack_ids(self._chunks[begin : begin + chunks], self.num_blocks)
        return torch.from_numpy(packed).to(self.device)

    def turns(self, chunks: int, cold_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Ids, staging and the source offset of a plain copy, for launches on different memory."""
        wanted = math.ceil(cold_bytes / (chunks * self.shape.chunk_bytes))
        turns = max(1, min(wanted, self.pool_chunks // chunks))
        places = self.most_chunks // chunks
        nbytes = chunks * self.stride
        found = []
        for turn in range(turns):
            at = turn % places * nbytes
            staging = self.staging[at : at + nbytes]
            source = turn * chunks * self.shape.chunk_bytes
            found.append((self.ids(turn * chunks, chunks), staging, source))
        return found

    def check(self, chunks: int) -> None:
        """Raises WrongBytes unless gather and scatter move what the reference moves.

        The scattered bytes differ from those before, and are restored afterwards.
        """
        import torch

        ids = self.ids(0, chunks)
        here = self.staging[: chunks * self.stride]
        there = torch.zeros_like(here)
        before = self.cache.clone()
        self.reference.gather(ids, there)
        here.zero_()
        self.copies.gather(ids, here)
        if not torch.equal(here, there):
            raise WrongBytes(f"{self.shape.name}: a gather of {chunks} chunks is wrong")
        here.bitwise_xor_(0x5A)
        self.copies.scatter(ids, here)
        there.copy_(here)
        self.reference.gather(ids, there)
        right = torch.equal(here, there)
        here.bitwise_xor_(0x5A)
        self.copies.scatter(ids, here)
        if not right or not torch.equal(before, self.cache):
            raise WrongBytes(f"{self.shape.name}: a scatter of {chunks} chunks is wrong")
        wait_for_all(self.device)


def _measure_one(case: Case, chunks: int, options: Options, peak: float) -> list[Row]:
    case.check(chunks)
    turns = case.turns(chunks, options.cold_bytes)
    nbytes = chunks * case.shape.chunk_bytes
    gathers = [_call(case.copies.gather, ids, staging) for ids, staging, _ in turns]
    scatters = [_call(case.copies.scatter, ids, staging) for ids, staging, _ in turns]
    copies = [
        _call(staging[:nbytes].copy_, case.cache[source : source + nbytes])
        for _, staging, source in turns
    ]
    timed: dict[str, Measure] = {
        "copy": captured(copies, case.device),
        GATHER: captured(gathers, case.device),
        SCATTER: captured(scatters, case.device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds):
        for name in rotated(list(timed), number):
            seconds[name].append(timed[name]())
    launch_us = _launch_us(gathers[0], case.device)
    moved = 2 * nbytes / 1e9  # read once, written once
    speeds = {name: [moved / each for each in taken] for name, taken in seconds.items()}
    return [
        row_of(
            what,
            case.shape,
            chunks,
            speeds[what],
            speeds["copy"],
            "device copy of the same bytes",
            of_peak=median(speeds[what]) / peak,
            launch_us=launch_us if what == GATHER else None,
        )
        for what in (GATHER, SCATTER)
    ]


def _call(function: Callable[..., object], *arguments: object) -> Launch:
    return lambda: function(*arguments)


def _launch_us(launch: Launch, device: torch.device) -> float:
    """Host time of one launch on an idle GPU."""
    times = []
    for _ in range(20):
        wait_for_all(device)
        started = time.perf_counter()
        launch()
        times.append(time.perf_counter() - started)
    return median(times) * 1e6


def _peak(nbytes: int, rounds: int, device: torch.device) -> float:
    """GB/s of a copy that is bound by memory bandwidth, read and written."""
    import torch

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = captured([_call(target.copy_, source)], device)
    return median([2 * nbytes / 1e9 / timed() for _ in range(max(3, rounds))])
