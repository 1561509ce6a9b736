# SPDX-License-Identifier: Apache-2.0
"""Segments found from shapes and strides, against the addresses of every element."""

from __future__ import annotations

import math
from dataclasses import replace
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


class TestKnownLayouts:
    """Shapes seen in vLLM: blocks 7, heads 2, tokens 4, head size 8."""

    def test_blocks_outermost(self) -> None:
        found = find_segments([cache([7, 2, 4, 16])], 7)
        assert found.segments == (Segment(0, 0, 256, 256),)

    def test_k_and_v_outermost(self) -> None:
        found = find_segments([cache([2, 7, 4, 2, 8])], 7)
        assert found.segments == (Segment(0, 0, 128, 128), Segment(0, 7 * 128, 128, 128))

    def test_heads_outermost(self) -> None:
        found = find_segments([cache([7, 2, 4, 16], order=[1, 0, 2, 3])], 7)
        assert found.segments == (Segment(0, 0, 128, 128), Segment(0, 7 * 128, 128, 128))

    def test_layers_inside_blocks_are_one_segment(self) -> None:
        layers = [
            cache([7, 128], name=f"layer.{n}", offset=n * 256, strides=(1024, 2)) for n in range(4)
        ]
        assert find_segments(layers, 7).segments == (Segment(0, 0, 1024, 1024),)

    def test_padding_behind_a_page_is_not_copied(self) -> None:
        found = find_segments([cache([7, 128], strides=(300, 2))], 7)
        assert found.segments == (Segment(0, 0, 256, 300),)

    def test_separate_storages(self) -> None:
        layers = [cache([7, 128], name=f"layer.{n}", storage=n) for n in range(3)]
        found = find_segments(layers, 7)
        assert found.segments == tuple(Segment(n, 0, 256, 256) for n in range(3))

    def test_layers_that_share_one_cache_are_copied_once(self) -> None:
        layers = [cache([7, 128]), cache([7, 128], name="layer.1")]
        assert find_segments(layers, 7).segments == (Segment(0, 0, 256, 256),)

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


class TestPages:
    """What the pages hold, in the order of memory."""

    @pytest.mark.parametrize(
        ("tensor", "pages"),
        [
            (cache([7, 2, 4, 16]), (Pages((1,), "float16", (2, 4, 16)),)),
            (cache([2, 7, 4, 2, 8]), (Pages((1, 2), "float16", (4, 2, 8)),)),
            # Heads before tokens in memory, after them in the tensor.
            (cache([7, 4, 2, 8], order=[0, 2, 1, 3]), (Pages((1,), "float16", (2, 4, 8)),)),
            (cache([7, 1, 16]), (Pages((1,), "float16", (16,)),)),
        ],
    )
    def test_of_one_tensor(self, tensor: TensorView, pages: tuple[Pages, ...]) -> None:
        assert find_segments([tensor], 7).pages == pages

    def test_of_layers_inside_blocks(self) -> None:
        layers = [
            cache([7, 2, 64], name=f"layer.{n}", offset=n * 256, strides=(1024, 128, 2))
            for n in range(4)
        ]
        assert find_segments(layers, 7).pages == (Pages((1,), "float16", (4, 2, 64)),)
        beside = [
            cache([7, 128], name=f"beside.{n}", storage=1, offset=n * 256, strides=(1024, 2))
            for n in range(4)
        ]
        pairs = [*beside, *(replace(each, storage=2) for each in beside)]
        assert find_segments(pairs, 7).pages == (Pages((2,), "float16", (4, 128)),)

    def test_of_separate_storages(self) -> None:
        layers = [cache([7, 128], name=f"layer.{n}", storage=n) for n in range(3)]
        states = [
            cache([7, 16], name=f"state.{n}", storage=n, dtype="float32", itemsize=4,
                  strides=(64, 4))
            for n in range(3, 5)
        ]  # fmt: skip
        assert find_segments([*layers, *states], 7).pages == (
            Pages((3,), "float16", (128,)),
            Pages((2,), "float32", (16,)),
        )

    def test_of_tensors_with_k_and_v_outside(self) -> None:
        layers = [cache([2, 7, 4, 2, 8], name=f"layer.{n}", storage=n) for n in range(3)]
        assert find_segments(layers, 7).pages == (Pages((3, 2), "float16", (4, 2, 8)),)

    def test_of_k_and_v_that_are_not_all_apart(self) -> None:
        """The second tensor's K is the first one's V: three segments."""
        layers = [
            cache([2, 7, 64], name="layer.0"),
            cache([2, 7, 64], name="layer.1", offset=7 * 128),
        ]
        assert find_segments(layers, 7).pages == (Pages((3,), "float16", (64,)),)

    def test_of_layers_that_share_one_cache(self) -> None:
        layers = [cache([7, 128]), cache([7, 128], name="layer.1")]
        assert find_segments(layers, 7).pages == (Pages((1,), "float16", (128,)),)

    def test_of_several_kinds_in_one_block_are_not_told(self) -> None:
        first = cache([7, 64], strides=(256, 2))
        second = cache([7, 32], name="layer.1", offset=128, strides=(256, 4), itemsize=4,
                       dtype="float32")  # fmt: skip
        found = find_segments([first, second], 7)
        assert found.segments == (Segment(0, 0, 256, 256),)
        assert found.pages == ()

    def test_of_a_tensor_with_holes(self) -> None:
        found = find_segments([cache([7, 4, 8], strides=(4 * 32, 32, 2))], 7)
        assert found.pages == (Pages((1, 4), "float16", (8,)),)


class TestHoles:
    def test_are_not_copied(self) -> None:
        """K alone out of K and V interleaved."""
        k = cache([7, 4, 8], strides=(4 * 32, 32, 2))
        pages = tuple(Segment(0, token * 32, 16, 128) for token in range(4))
        assert find_segments([k], 7).segments == pages

    def test_that_belong_to_another_tensor(self) -> None:
        k = cache([7, 4, 8], strides=(4 * 32, 32, 2), name="k")
        v = cache([7, 4, 8], strides=(4 * 32, 32, 2), name="v", offset=16)
        # Dense runs, which together leave no hole.
        assert find_segments([k, v], 7).segments == (Segment(0, 0, 128, 128),)
        half = cache([7, 2, 8], strides=(4 * 32, 64, 2), name="v", offset=16)
        assert find_segments([k, half], 7).segments == (
            Segment(0, 0, 48, 128),
            Segment(0, 64, 48, 128),
        )


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

    def test_k_and_v_outermost_share_a_format(
        self,
    ) -> None:
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
        with pytest.raises(DeviceError, match="all tensors over 4, of at most 3"):
            find_segments([view], 7)

    def test_no_blocks(self) -> None:
        with pytest.raises(DeviceError, match="at least one block, not 0"):
            find_segments([cache([0])], 0)

    @pytest.mark.parametrize("rows", [70_000, 2_000_000])
    def test_more_pieces_than_a_layout_may_have(self, rows: int) -> None:
        """Rows that belong to the block in turn: no page holds two of them."""
        view = cache([rows, 7, 8])
        with pytest.raises(DeviceError, match=f"scattered over {rows} pieces"):
            find_segments([view], 7)


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


def test_the_reference_knows_addresses() -> None:
    view = cache([7, 4], offset=6)
    assert addresses(view).shape == (7, 4, ITEM)
    assert sorted(addresses(view).flat) == list(range(6, 6 + math.prod(view.shape) * ITEM))
