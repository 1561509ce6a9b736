"""Gather and scatter alone: random blocks of a paged KV cache to staging, and back.

The reference is a device copy of the same bytes, taken in the same round and in the same way;
``of_peak`` compares with a copy of gibibytes, which a launch of a few megabytes cannot reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_redis.bench.gpu.rows import GATHER, SCATTER, Row, kernel_target, median, ratio_of
from lmcache_redis.bench.gpu.shapes import MIB, Shape
from lmcache_redis.bench.gpu.timing import Launch, Measure, captured, queued, wait_for_all
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.table import pack_ids, staging_stride_bytes
from lmcache_redis.errors import LMCacheRedisError

if TYPE_CHECKING:
    import torch

    from lmcache_redis.device.cuda_copies import BlockIds, PageCopies

_COLD_BYTES = 512 * MIB  # touched before anything is touched again: several times the cache
_PEAK_BYTES = 2048 * MIB
_COPIES = 6  # a cache of two, staging; and for the check another of both


class WrongBytes(LMCacheRedisError):
    """What was to be timed copies something else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. room_bytes: of the GPU's memory, for cache and staging."""

    shapes: Sequence[Shape]
    chunk_counts: Sequence[int]
    rounds: int
    room_bytes: int
    cold_bytes: int = _COLD_BYTES
    peak_bytes: int = _PEAK_BYTES


def measure(plan: Plan, device: torch.device, say: Callable[[str], None]) -> list[Row]:
    """Two rows for each shape and count of chunks. Raises WrongBytes."""
    peak = _peak(plan, device)
    say(f"device copy, {plan.peak_bytes // MIB} MiB: {peak:.0f} GB/s read and written")
    rows: list[Row] = []
    for shape in plan.shapes:
        most = plan.room_bytes // (_COPIES * shape.chunk_bytes)
        counts = [n for n in plan.chunk_counts if n <= most]
        if not counts:
            say(f"{shape.name}: left out: the GPU's memory is too small")
            continue
        case = Case(shape, max(counts), device)
        for chunks in counts:
            size = f"{chunks * shape.chunk_bytes // MIB} MiB"
            say(f"{shape.name}, {chunks} chunks ({size}), copied by {case.copies.name}")
            rows += _measure_one(case, chunks, plan, peak)
        del case  # before the next one takes its memory
    return rows


class Case:
    """A paged KV cache of random bytes for twice as many chunks as are moved, and staging."""

    def __init__(self, shape: Shape, most_chunks: int, device: torch.device) -> None:
        import torch

        from lmcache_redis.device.cuda_copies import page_copies
        from lmcache_redis.device.cuda_fallback import IndexedCopies

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
        self.copies: PageCopies = page_copies(self.layout, [self.cache])
        self.torch_alone: PageCopies = IndexedCopies(self.layout, [self.cache])
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1))
        self._chunks = order.view(self.pool_chunks, shape.blocks_per_chunk).tolist()

    def ids(self, begin: int, chunks: int) -> BlockIds:
        """So many chunks of the random order, from one of them on."""
        import torch

        from lmcache_redis.device.cuda_copies import BlockIds

        host = pack_ids(self._chunks[begin : begin + chunks], self.num_blocks)
        return BlockIds(host, torch.from_numpy(host).to(self.device))

    def turns(self, chunks: int, cold_bytes: int) -> list[tuple[BlockIds, torch.Tensor, int]]:
        """Ids, staging and a place for a plain copy's source, for launches on different memory."""
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
        """Raises WrongBytes unless gather and scatter move what torch alone moves.

        Bytes that are scattered differ from what was there, and are taken back afterwards.
        """
        import torch

        ids = self.ids(0, chunks)
        here = self.staging[: chunks * self.stride]
        there = torch.zeros_like(here)
        before = self.cache.clone()
        self.torch_alone.gather(ids, there)
        here.zero_()
        self.copies.gather(ids, here)
        if not torch.equal(here, there):
            raise WrongBytes(f"{self.shape.name}: a gather of {chunks} chunks is wrong")
        here.bitwise_xor_(0x5A)
        self.copies.scatter(ids, here)
        there.copy_(here)
        self.torch_alone.gather(ids, there)
        right = torch.equal(here, there)
        here.bitwise_xor_(0x5A)
        self.copies.scatter(ids, here)
        if not right or not torch.equal(before, self.cache):
            raise WrongBytes(f"{self.shape.name}: a scatter of {chunks} chunks is wrong")
        wait_for_all(self.device)


def _measure_one(case: Case, chunks: int, plan: Plan, peak: float) -> list[Row]:
    case.check(chunks)
    turns = case.turns(chunks, plan.cold_bytes)
    nbytes = chunks * case.shape.chunk_bytes
    gathers = [_call(case.copies.gather, ids, staging) for ids, staging, _ in turns]
    scatters = [_call(case.copies.scatter, ids, staging) for ids, staging, _ in turns]
    copies = [
        _call(staging[:nbytes].copy_, case.cache[source : source + nbytes])
        for _, staging, source in turns
    ]
    alone = [_call(case.torch_alone.gather, ids, staging) for ids, staging, _ in turns]
    timed: dict[str, Measure] = {
        "copy": captured(copies, case.device),
        GATHER: captured(gathers, case.device),
        SCATTER: captured(scatters, case.device),
        "alone": queued(alone, case.device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(plan.rounds):
        names = list(timed)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(timed[name]())
    launch_us = _launch_us(gathers[0], case.device)
    moved = 2 * nbytes / 1e9  # read once, written once
    speeds = {name: [moved / each for each in taken] for name, taken in seconds.items()}
    rows = []
    for what in (GATHER, SCATTER):
        ratios = ratio_of(speeds[what], speeds["copy"])
        rows.append(
            Row(
                what=what,
                case=case.shape.name,
                page_kib=case.shape.page_bytes / 1024,
                chunks=chunks,
                value=median(speeds[what]),
                unit="GB/s",
                against="device copy of the same bytes",
                reference=median(speeds["copy"]),
                ratio=median(ratios),
                worst=min(ratios),
                target=kernel_target(case.shape.page_bytes),
                rounds=plan.rounds,
                of_peak=median(speeds[what]) / peak,
                torch_alone=median(speeds["alone"]) if what == GATHER else None,
                launch_us=launch_us if what == GATHER else None,
            )
        )
    return rows


def _call(function: Callable[..., object], *arguments: object) -> Launch:
    return lambda: function(*arguments)


def _launch_us(launch: Launch, device: torch.device) -> float:
    """Host time of one launch while the GPU is idle enough to take it."""
    import time

    times = []
    for _ in range(20):
        wait_for_all(device)
        started = time.perf_counter()
        launch()
        times.append(time.perf_counter() - started)
    return median(times) * 1e6


def _peak(plan: Plan, device: torch.device) -> float:
    """GB/s of a copy so large that nothing but memory counts, read and written."""
    import torch

    nbytes = min(plan.peak_bytes, plan.room_bytes // 2)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = captured([_call(target.copy_, source)], device)
    return median([2 * nbytes / 1e9 / timed() for _ in range(max(3, plan.rounds))])
