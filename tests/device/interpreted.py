"""The Triton kernels under Triton's interpreter, on CPU tensors. Run by `test_cuda_kernels`.

In a process of its own: TRITON_INTERPRET is read when Triton is imported, which other tests (and
torch) may have done before. The interpreter runs a program in some milliseconds, so tiles are
small here: pages of a few bytes are cut and share tiles as pages of kibibytes do on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device import cuda_kernels
from lmcache_redis.device.blocks import find_segments, view_tensors
from lmcache_redis.device.cuda_copies import PageCopies, page_copies
from lmcache_redis.device.cuda_kernels import TritonCopies
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.table import SegmentTable, Storage
from lmcache_redis.errors import DeviceError
from tests.device.cpu_streams import gpu_is_cpu, open_over_cpu
from tests.device.layouts import Call, Paged, calls, check_call
from tests.device.moves import BLANK, Make, Move, check_gather, check_scatter, ids_of, moves

CPU = torch.device("cpu")
TILES = st.sampled_from([4, 16, 64])
MOST_PROGRAMS = 25  # a chunk


def table_over(
    layout: KVLayout, storages: Sequence[torch.Tensor], units_per_tile: int
) -> SegmentTable:
    places = [Storage(storage.data_ptr(), storage.numel()) for storage in storages]
    return SegmentTable(layout, places, units_per_tile)


def interpreted(units_per_tile: int, n_blocks: int = 1) -> Make:
    """Tiles are larger if a chunk of so many blocks would take too many programs."""

    def make(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
        units = units_per_tile
        table = table_over(layout, storages, units)
        while len(table.tiles(n_blocks).rows) > MOST_PROGRAMS:
            units *= 2
            table = table_over(layout, storages, units)
        return TritonCopies(table, CPU)

    return make


@settings(max_examples=50)
@given(moves(unique=False, skip=True), TILES)
def test_gather_equals_the_reference(move: Move, units_per_tile: int) -> None:
    check_gather(interpreted(units_per_tile, len(move.chunks[0])), move)


@settings(max_examples=50)
@given(moves(unique=True, skip=True), TILES)
def test_scatter_equals_the_reference(move: Move, units_per_tile: int) -> None:
    check_scatter(interpreted(units_per_tile, len(move.chunks[0])), move)


@pytest.fixture(scope="module")
def without_gpu() -> Iterator[None]:
    with gpu_is_cpu():
        yield


@pytest.mark.usefixtures("without_gpu")
@settings(max_examples=12)
@given(calls(granule=8, device="cuda"))
def test_a_device_in_both_directions(call: Call) -> None:
    """As the agent calls it, from block ids to slots: with the kernels that were chosen."""
    device = open_over_cpu(call.case)
    assert [copies.name for copies in device._copies] == ["Triton"]
    check_call(device, call)
    device.close()


def test_a_launch_that_hangs_keeps_no_other_gpu_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread compiles at a time; a launch waits only for its own GPU."""
    launched, go_on = threading.Event(), threading.Event()
    compiling: list[bool] = []

    class Kernel:
        def warmup(self, *arguments: Any, **options: Any) -> None:
            compiling.append(cuda_kernels._compiling.locked())

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(rows: Any, ids: torch.Tensor, *arguments: Any, **options: Any) -> None:
                if ids[0, 0] == 7:
                    launched.set()
                    assert go_on.wait(30)

            return launch

    monkeypatch.setattr(cuda_kernels, "_move_chunks", Kernel())
    storage = torch.zeros(8 * 64, dtype=torch.uint8)
    case = Paged(layout_of(Segment(0, 0, 64, 64)), [storage.numpy()])
    staging = torch.zeros(64, dtype=torch.uint8)

    def gather(copies: PageCopies, block: int) -> None:
        copies.gather(ids_of(Move(case, [[block]], [0], 0), "cpu"), staging)

    hanging, other = (interpreted(16)(case.layout, [storage]) for _ in range(2))
    thread = threading.Thread(target=gather, args=(hanging, 7))
    thread.start()
    assert launched.wait(30)
    done = threading.Event()
    beside = threading.Thread(target=lambda: (gather(other, 1), gather(hanging, 2), done.set()))
    beside.start()
    assert done.wait(30), "a launch waited for the one that hangs"
    go_on.set()
    thread.join()
    beside.join()
    assert compiling == [True, True]


BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 6, 2, 4, 8, 3


def caches(kind: str) -> dict[str, torch.Tensor]:
    """KV caches as engines lay them out, scaled down, of random bytes."""

    def memory(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)

    names = [f"layer.{layer}" for layer in range(LAYERS)]
    if kind == "k and v apart":
        return {name: memory(2, BLOCKS, TOKENS, HEADS, WIDTH) for name in names}
    if kind == "k and v together":
        return {name: memory(BLOCKS, 2, TOKENS, HEADS, WIDTH) for name in names}
    if kind == "head-major":
        return {name: memory(BLOCKS, HEADS, TOKENS, 2 * WIDTH) for name in names}
    if kind == "token-major in memory, head-major to look at":
        return {
            name: memory(BLOCKS, TOKENS, HEADS, 2 * WIDTH).transpose(1, 2) for name in names
        }  # fmt: skip
    if kind == "mla":
        return {name: memory(BLOCKS, TOKENS, 36) for name in names}
    if kind == "fp8":
        return {
            name: memory(BLOCKS, TOKENS, HEADS, WIDTH, dtype=torch.float8_e4m3fn) for name in names
        }
    if kind == "bytes of odd pages":
        return {name: memory(BLOCKS, TOKENS, 33, dtype=torch.uint8) for name in names}
    if kind == "one storage, blocks outermost":
        whole = memory(BLOCKS, LAYERS, TOKENS, HEADS, WIDTH)
        return {name: whole[:, layer] for layer, name in enumerate(names)}
    if kind == "one storage, layers outermost":
        whole = memory(LAYERS, BLOCKS, TOKENS, HEADS, WIDTH)
        return {name: whole[layer] for layer, name in enumerate(names)}
    if kind == "groups of different pages in one storage":
        small, large = BLOCKS * TOKENS * 4, BLOCKS * TOKENS * 24
        whole = memory(2 * small + large)
        return {
            "index.0": whole[:small].view(BLOCKS, TOKENS, 4),
            "layer.0": whole[small : small + large].view(BLOCKS, TOKENS, 24),
            "index.1": whole[small + large :].view(BLOCKS, TOKENS, 4),
        }
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "k and v apart",
        "k and v together",
        "head-major",
        "token-major in memory, head-major to look at",
        "mla",
        "fp8",
        "bytes of odd pages",
        "one storage, blocks outermost",
        "one storage, layers outermost",
        "groups of different pages in one storage",
    ],
)
def test_layouts_of_engines(kind: str) -> None:
    """Two chunks move to other blocks, in two launches; compared in the tensors' own terms."""
    tensors = caches(kind)
    views, storages = view_tensors(tensors)
    segments, page_format, _ = find_segments(views, BLOCKS)
    layout = KVLayout((), "float16", "cuda", TOKENS, BLOCKS, segments, page_format)
    flat = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
    case = Paged(layout, [each.numpy() for each in flat])
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = interpreted(16)(layout, flat)
    out = Move(case, [[5, 1], [2, 5]], [0, 0], 0)
    back = Move(case, [[3, 0], [4, 1]], [0, 1], 0)
    staging = torch.full((2 * out.stride,), BLANK, dtype=torch.uint8)
    copies.gather(ids_of(out, "cpu"), staging)
    copies.scatter(ids_of(back, "cpu"), staging)
    moved = {3: 5, 0: 1, 1: 5}  # 4 is skipped
    for name, tensor in tensors.items():
        dim = 1 if kind == "k and v apart" else 0
        for block in range(BLOCKS):
            want = before[name].select(dim, moved.get(block, block))
            assert tensor.select(dim, block).view(torch.uint8).equal(want.view(torch.uint8))


def layout_of(*segments: Segment) -> KVLayout:
    return KVLayout((), "uint8", "cuda", 16, 8, segments)


def test_staging_that_is_short_or_crooked_is_refused() -> None:
    storage = torch.zeros(8 * 64, dtype=torch.uint8)
    case = Paged(layout_of(Segment(0, 0, 64, 64)), [storage.numpy()])
    copies = interpreted(16)(case.layout, [storage])
    ids = ids_of(Move(case, [[1, 2]], [0], 0), "cpu")
    staging = torch.zeros(129, dtype=torch.uint8)
    copies.gather(ids, staging[:128])
    with pytest.raises(DeviceError, match="127 bytes of staging, of which 128"):
        copies.gather(ids, staging[:127])
    with pytest.raises(DeviceError, match="not aligned to 16"):
        copies.scatter(ids, staging[1:])


def test_the_choice_is_triton_and_warming_up_changes_nothing() -> None:
    content = np.arange(8 * 48, dtype=np.uint8)
    storage = torch.from_numpy(content.copy())
    copies = page_copies(layout_of(Segment(0, 0, 48, 48)), [storage])
    assert isinstance(copies, TritonCopies)
    assert storage.numpy().tobytes() == content.tobytes()


def test_the_rows_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(8 * 64, dtype=torch.uint8)
    layout = layout_of(Segment(0, 0, 64, 64))
    table = table_over(layout, [storage], 16)
    made: list[int] = []
    tiles = table.tiles

    def counted(n_blocks: int) -> Any:
        made.append(n_blocks)
        return tiles(n_blocks)

    monkeypatch.setattr(table, "tiles", counted)
    copies = TritonCopies(table, CPU)
    staging = torch.zeros(3 * 64, dtype=torch.uint8)
    for ids in ([1, 2], [3, 4], [5, 6, 7], [0, 1]):
        case = Paged(layout, [storage.numpy()])
        copies.gather(ids_of(Move(case, [ids], [0], 0), "cpu"), staging)
    assert made == [2, 3]
