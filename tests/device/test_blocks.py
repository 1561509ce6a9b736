# SPDX-License-Identifier: Apache-2.0
"""Segments found from shapes and strides, against the addresses of every element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from lmcache_redis.device import blocks
from lmcache_redis.device.blocks import (
    PagedSegments,
    TensorView,
    block_dimension,
    find_segments,
    view_tensors,
)
from lmcache_redis.device.layout import Pages, Segment
from lmcache_redis.errors import DeviceError

ITEM = 2


def strides_of(order: list[int], shape: list[int], padding: list[int]) -> list[int]:
    """Byte strides of ``shape`` laid out outermost first in ``order``, padded after each level."""
    strides = [0] * len(shape)
    step = ITEM
    for dim, gap in zip(reversed(order), padding, strict=True):
        strides[dim] = step
        step = step * shape[dim] + gap * ITEM
    return strides


def addresses(view: TensorView) -> np.ndarray:
    """The address of each byte of each element, in the tensor's shape and one byte dimension."""
    dims = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True)]
    dims.append((view.itemsize, 1))
    total = sum((size - 1) * stride for size, stride in dims) + 1
    every = np.arange(view.offset, view.offset + total)
    item = every.itemsize
    return as_strided(every, [size for size, _ in dims], [stride * item for _, stride in dims])


def pages_of(found: PagedSegments, storage: int, block: int) -> list[int]:
    """Every byte address that the segments copy for one block."""
    return [
        segment.offset + block * segment.block_stride + byte
        for segment in found.segments
        if segment.storage == storage
        for byte in range(segment.page_bytes)
    ]


# Logical dimensions of a cache of layers: layer, block, K or V, head, token, element.
LAYERS = ["L", "B", "S", "H", "N", "C"]


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[TensorView], int]:
    """One tensor a layer out of one storage, in any physical order, padded anywhere."""
    shape = [draw(st.integers(1, 3)), draw(st.integers(2, 5)), *draw(
        st.lists(st.integers(1, 3), min_size=4, max_size=4)
    )]  # fmt: skip
    order = list(draw(st.permutations(range(6))))
    padding = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=6, max_size=6))
    strides = strides_of(order, shape, padding)
    offset = draw(st.integers(0, 3)) * ITEM
    views = [
        TensorView(
            name=f"layer.{layer}",
            dtype="float16",
            itemsize=ITEM,
            storage=0,
            offset=offset + layer * strides[0],
            shape=tuple(shape[1:]),
            strides=tuple(strides[1:]),
        )
        for layer in range(shape[0])
    ]
    return views, shape[1]


@given(caches())
def test_every_byte_of_every_block_is_copied_with_its_block(
    case: tuple[list[TensorView], int],
) -> None:
    views, num_blocks = case
    found = find_segments(views, num_blocks, {view.name: view.strides[0] for view in views})
    mine = [{int(a) for view in views for a in addresses(view)[block].flat} for block in
            range(num_blocks)]  # fmt: skip
    for block in range(num_blocks):
        copied = pages_of(found, 0, block)
        assert len(copied) == len(set(copied))
        assert mine[block] == set(copied)


@given(caches(), st.integers(0, 4), st.integers(2, 9))
def test_the_page_format_is_of_the_inside_of_a_block(
    case: tuple[list[TensorView], int], shift: int, num_blocks: int
) -> None:
    views, old_num_blocks = case
    outermost = max(views[0].strides) == views[0].strides[0] and len(views) == 1
    hints = {view.name: view.strides[0] for view in views}
    found = find_segments(views, old_num_blocks, hints)
    moved = [
        TensorView(
            view.name,
            view.dtype,
            view.itemsize,
            view.storage,
            view.offset + shift * 64,
            (num_blocks if outermost else old_num_blocks, *view.shape[1:]),
            view.strides,
        )
        for view in views
    ]
    same = find_segments(moved, num_blocks if outermost else old_num_blocks, hints)
    assert same.page_format == found.page_format
    assert [s.page_bytes for s in same.segments] == [s.page_bytes for s in found.segments]


def cache(shape: list[int], order: list[int] | None = None, **changes: object) -> TensorView:
    fields: dict[str, object] = {
        "name": "layer.0",
        "dtype": "float16",
        "itemsize": ITEM,
        "storage": 0,
        "offset": 0,
        "shape": tuple(shape),
        "strides": tuple(strides_of(order or list(range(len(shape))), shape, [0] * len(shape))),
    }
    return TensorView(**(fields | changes))  # type: ignore[arg-type]


def layers(
    count: int, shape: list[int], apart: int = 0, storage: int = 0, **changes: object
) -> list[TensorView]:
    """Tensors that begin so many bytes apart in one storage; 0: each has a storage of its own."""
    return [
        cache(
            shape, name=f"layer.{storage}.{n}", offset=n * apart,
            storage=storage if apart else storage + n, **changes,
        )
        for n in range(count)
    ]  # fmt: skip


F16, IN_BLOCKS = "float16", (1024, 2)
HALF_TOKENS = (4 * 32, 32, 2)  # K alone out of K and V interleaved
# Tensors of 7 blocks, as vLLM has them with 2 heads, 4 tokens and a head size of 8: the segments to
# copy (storage, offset, bytes of a page, and of a block), and what the pages hold, in the order of
# memory.
KNOWN: dict[str, tuple[list[TensorView], list[tuple[int, int, int, int]], list[Pages]]] = {
    "blocks outermost": (
        [cache([7, 2, 4, 16])],
        [(0, 0, 256, 256)],
        [Pages((1,), F16, (2, 4, 16))],
    ),
    "heads before tokens in memory, after them in the tensor": (
        [cache([7, 4, 2, 8], order=[0, 2, 1, 3])],
        [(0, 0, 128, 128)],
        [Pages((1,), F16, (2, 4, 8))],
    ),
    "padding behind a page, not copied": (
        [cache([7, 128], strides=(300, 2))],
        [(0, 0, 256, 300)],
        [Pages((1,), F16, (128,))],
    ),
    "layers inside blocks, one segment a storage": (
        [
            *layers(4, [7, 128], 256, storage=1, strides=IN_BLOCKS),
            *layers(4, [7, 128], 256, storage=2, strides=IN_BLOCKS),
        ],
        [(1, 0, 1024, 1024), (2, 0, 1024, 1024)],
        [Pages((2,), F16, (4, 128))],
    ),
    "storages of two kinds": (
        [
            *layers(3, [7, 128]),
            *layers(2, [7, 16], storage=3, dtype="float32", itemsize=4, strides=(64, 4)),
        ],
        [(0, 0, 256, 256), (1, 0, 256, 256), (2, 0, 256, 256), (3, 0, 64, 64), (4, 0, 64, 64)],
        [Pages((3,), F16, (128,)), Pages((2,), "float32", (16,))],
    ),
    "k and v outermost": (
        layers(2, [2, 7, 4, 2, 8]),
        [(0, 0, 128, 128), (0, 896, 128, 128), (1, 0, 128, 128), (1, 896, 128, 128)],
        [Pages((2, 2), F16, (4, 2, 8))],
    ),
    "the second tensor's k is the first one's v": (
        layers(2, [2, 7, 64], 896),
        [(0, 0, 128, 128), (0, 896, 128, 128), (0, 1792, 128, 128)],
        [Pages((3,), F16, (64,))],
    ),
    "layers that share one cache, copied once": (
        [cache([7, 128]), cache([7, 128], name="layer.1")],
        [(0, 0, 256, 256)],
        [Pages((1,), F16, (128,))],
    ),
    "several kinds in one block, not told": (
        [
            cache([7, 64], strides=(256, 2)),
            cache([7, 32], name="f", offset=128, strides=(256, 4), itemsize=4, dtype="float32"),
        ],
        [(0, 0, 256, 256)],
        [],
    ),
    "holes, not copied": (
        [cache([7, 4, 8], strides=HALF_TOKENS)],
        [(0, token * 32, 16, 128) for token in range(4)],
        [Pages((1, 4), F16, (8,))],
    ),
    "holes that another tensor fills": (
        [
            cache([7, 4, 8], strides=HALF_TOKENS, name=name, offset=n * 16)
            for n, name in enumerate("kv")
        ],
        [(0, 0, 128, 128)],
        [Pages((1,), F16, (8, 8))],
    ),
    "holes that another tensor fills in part": (
        [
            cache([7, 4, 8], strides=HALF_TOKENS, name="k"),
            cache([7, 2, 8], strides=(128, 64, 2), name="v", offset=16),
        ],
        [(0, 0, 48, 128), (0, 64, 48, 128)],
        [],
    ),
}


class TestKnownLayouts:
    @pytest.mark.parametrize(("views", "segments", "pages"), KNOWN.values(), ids=KNOWN)
    def test_has_these_segments_and_pages(
        self,
        views: list[TensorView],
        segments: list[tuple[int, int, int, int]],
        pages: list[Pages],
    ) -> None:
        found = find_segments(views, 7)
        assert found.segments == tuple(Segment(*each) for each in segments)
        assert found.pages == tuple(pages)

    def test_kernel_blocks_need_the_engines_word(self) -> None:
        halves = cache([14, 64])
        assert find_segments([halves], 7, {"layer.0": 256}).segments == (Segment(0, 0, 256, 256),)
        with pytest.raises(
            DeviceError, match=r"'layer.0' has no dimension of 7 blocks.*\[14, 64\]"
        ):
            find_segments([halves], 7)

    def test_one_block(self) -> None:
        found = find_segments([cache([1, 2, 4, 16])], 1, {"layer.0": 256})
        assert found.segments == (Segment(0, 0, 256, 256),)
        # Nothing is that far away: a stride of one block means nothing.
        for stride in (0, 1000):
            view = cache([1, 128], strides=(stride, 2))
            assert find_segments([view], 1, {"layer.0": stride}).segments == found.segments


class TestPageFormat:
    @pytest.mark.parametrize(
        "other",
        [
            cache([7, 4, 2, 16], order=[0, 2, 1, 3]),
            cache([7, 2, 4, 16], order=[0, 2, 1, 3]),
            cache([7, 2, 4, 16], name="layer.1"),
            cache([7, 2, 4, 16], dtype="bfloat16"),
            cache([7, 2, 64]),
        ],
    )
    def test_tells_orders_of_elements_apart(self, other: TensorView) -> None:
        one, two = (find_segments([view], 7) for view in (cache([7, 2, 4, 16]), other))
        assert [s.page_bytes for s in one.segments] == [s.page_bytes for s in two.segments]
        assert one.page_format != two.page_format

    def test_tells_the_order_of_tensors_apart(self) -> None:
        a, b = cache([7, 8], name="a"), cache([7, 8], name="b", storage=1)
        assert find_segments([a, b], 7).page_format != find_segments([b, a], 7).page_format

    def test_k_and_v_outermost_share_a_format(self) -> None:
        formats = {find_segments([cache([2, n, 4, 2, 8])], n).page_format for n in (7, 9, 100)}
        assert len(formats) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("view", "num_blocks", "reason"),
        [
            (cache([6, 8]), 7, "no dimension of 7 blocks"),
            (cache([7, 7]), 7, r"more than one dimension \(0 and 1\)"),
            (cache([7, 8], strides=(0, 2)), 7, "overlaps itself"),
            (cache([7, 8], strides=(16, 0)), 7, "overlaps itself"),
            (cache([7, 8], strides=(8, 2)), 7, "overlaps itself"),
            (cache([7, 0, 8]), 7, "empty"),
            (cache([0]), 7, "empty"),
            (cache([]), 7, "no dimension"),
        ],
    )
    def test_with_the_tensor_named(self, view: TensorView, num_blocks: int, reason: str) -> None:
        with pytest.raises(DeviceError, match=reason) as caught:
            find_segments([view], num_blocks)
        for said in ("'layer.0'", f"shape {list(view.shape)}", f"strides {list(view.strides)}"):
            assert said in str(caught.value)

    def test_a_word_of_the_engine_that_fits_no_dimension(self) -> None:
        with pytest.raises(DeviceError, match="7 blocks that are 100 bytes apart"):
            find_segments([cache([7, 8])], 7, {"layer.0": 100})

    def test_a_word_of_the_engine_settles_which(self) -> None:
        view = cache([7, 7, 8], order=[1, 0, 2])
        assert find_segments([view], 7, {"layer.0": 16}).segments == tuple(
            Segment(0, n * 112, 16, 16) for n in range(7)
        )
        assert find_segments([view], 7, {"layer.0": 112}).segments == (Segment(0, 0, 112, 112),)
        # Of dimensions as far apart, the one that need not be cut: of one block here.
        assert block_dimension(cache([1, 4, 8]), 1, 64) == (0, 1)

    def test_pages_of_a_size_that_nothing_touching_has(self) -> None:
        view = cache([7, 2, 64])
        assert len(find_segments([view], 7, None, {"layer.0": 128}).segments) == 2
        with pytest.raises(DeviceError, match="has no pages of 64 bytes"):
            find_segments([view], 7, None, {"layer.0": 64})

    @pytest.mark.parametrize("limit", ["_MAX_PIECES", "MAX_SEGMENTS"])
    def test_as_many_pieces_as_a_layout_may_have(
        self, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        view = cache([4, 7, 8])
        monkeypatch.setattr(blocks, limit, 4)
        assert len(find_segments([view], 7).segments) == 4
        monkeypatch.setattr(blocks, limit, 3)
        said = r"scattered over 4 pieces.*all tensors over 4, of at most 3"
        with pytest.raises(DeviceError, match=said):
            find_segments([view], 7)

    def test_no_blocks(self) -> None:
        with pytest.raises(DeviceError, match="at least one block, not 0"):
            find_segments([cache([0])], 0)

    def test_more_pieces_than_a_layout_may_have(self) -> None:
        """Rows that belong to the block in turn: no page holds two of them."""
        with pytest.raises(DeviceError, match="scattered over 2000000 pieces"):
            find_segments([cache([2_000_000, 7, 8])], 7)


def test_a_page_format_never_changes() -> None:
    """Stored chunks are found by it."""
    view = cache([7, 2, 4, 16])
    assert find_segments([view], 7).page_format == "52256e5d85b24641eaa32fcd02bb53ff"
    of_share = find_segments([view], 7, None, {"layer.0": 128})
    assert of_share.page_format == "a0aaccc1482e17bb7fac1f6a0e0f0701"


class TestTensors:
    """What an engine registers, as views of its storages."""

    def test_in_the_order_of_their_appearance(self) -> None:
        whole, other = torch.zeros(7, 2, 8, dtype=torch.float16), torch.zeros(7, 4)
        views, storages = view_tensors({"k": whole[:, 0], "x": other, "v": whole[:, 1]})
        assert [(each.name, each.storage, each.offset) for each in views] == [
            ("k", 0, 0), ("x", 1, 0), ("v", 0, 16),
        ]  # fmt: skip
        assert [each.data_ptr() for each in storages] == [whole.data_ptr(), other.data_ptr()]
        assert (views[2].dtype, views[2].shape, views[2].strides) == ("float16", (7, 8), (32, 2))

    def test_that_cannot_be_registered(self) -> None:
        states: Any = [torch.zeros(7, 8)] * 2
        with pytest.raises(DeviceError, match="registered no KV cache tensors"):
            view_tensors({})
        with pytest.raises(DeviceError, match=r"'state' is a list, not one tensor.*Mamba"):
            view_tensors({"k": torch.zeros(7, 8), "state": states})
        with pytest.raises(DeviceError, match="KV cache 'k': "):
            view_tensors({"k": torch.zeros(7, 8, dtype=torch.complex64)})

    def test_of_storages_that_touch_or_overlap(self) -> None:
        memory = bytearray(128)

        def part(offset: int) -> torch.Tensor:
            return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=64)

        assert len(view_tensors({"b": part(64), "a": part(0)})[1]) == 2
        with pytest.raises(DeviceError, match="cover the same memory"):
            view_tensors({"b": part(63), "a": part(0)})
