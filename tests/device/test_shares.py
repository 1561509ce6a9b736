# SPDX-License-Identifier: Apache-2.0
"""Shares of one model's KV have the same bytes, and the same layout, at every TP size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device import shares as shares_module
from lmcache_redis.device.blocks import PagedSegments, TensorView
from lmcache_redis.device.layout import Pages
from lmcache_redis.device.shares import (
    HeadShares,
    Share,
    default_shares,
    find_share,
    find_shares,
    shares_of_rank,
)
from lmcache_redis.errors import ConfigError, DeviceError
from tests.device.test_blocks import ITEM, strides_of

# Logical dimensions: layer, block, K or V, head, token, element. A layer's tensor has all but L.
L, B, KV, H, N, C = range(6)
# Outermost first, as they may lie in memory: whatever is outside of the heads.
ORDERS = [
    [L, B, KV, H, N, C],
    [L, KV, B, H, N, C],
    [L, B, H, N, KV, C],
    [L, B, H, KV, N, C],
    [B, L, KV, H, N, C],
    [B, L, H, KV, N, C],
    [B, H, L, KV, N, C],
    [B, KV, H, L, N, C],
    [B, H, KV, L, N, C],
]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint16]


class Rank:
    """The KV of some heads in memory, in one storage, with a view for each layer."""

    def __init__(self, numbers: Numbers, order: list[int]) -> None:
        shape = list(numbers.shape)
        strides = strides_of(order, shape, [0] * 6)
        self.memory = np.zeros(numbers.nbytes, np.uint8)
        self.numbers = np.lib.stride_tricks.as_strided(self.memory.view(np.uint16), shape, strides)
        self.numbers[...] = numbers
        self.views = [
            TensorView(
                f"layer.{layer}", "float16", ITEM, 0, layer * strides[L],
                tuple(shape[1:]), tuple(strides[1:]),
            )
            for layer in range(shape[L])
        ]  # fmt: skip
        self.hints = {view.name: strides[B] for view in self.views}
        self.dims = {view.name: H - 1 for view in self.views}
        self.num_blocks = shape[B]

    def find(self, share: Share) -> PagedSegments:
        return find_share(self.views, self.num_blocks, self.dims, share, self.hints)

    def pages(self, share: Share, blocks: list[int]) -> list[Bytes]:
        """Views of the memory in the order of a part, see `KVLayout.segments`."""
        return [
            self.memory[at : at + each.page_bytes]
            for each in self.find(share).segments
            for at in (each.offset + block * each.block_stride for block in blocks)
        ]

    def gather(self, share: Share, blocks: list[int]) -> bytes:
        return b"".join(page.tobytes() for page in self.pages(share, blocks))

    def scatter(self, share: Share, blocks: list[int], part: bytes) -> None:
        at = 0
        for page in self.pages(share, blocks):
            page[:] = np.frombuffer(part, np.uint8)[at : at + len(page)]
            at += len(page)
        assert at == len(part)


def rank_of(numbers: Numbers, rank: int, ranks: int, order: list[int]) -> Rank:
    heads = numbers.shape[H]
    first, local = rank * heads // ranks, max(1, heads // ranks)
    return Rank(numbers[:, :, :, first : first + local], order)


@st.composite
def models(draw: st.DrawFn) -> tuple[Numbers, int, list[int]]:
    """KV of all heads, the number of shares, and an order in memory."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    shares = draw(st.sampled_from([each for each in (1, 2, 4, 8) if each <= heads]))
    sizes = [draw(st.integers(1, 3)), 5, draw(st.integers(1, 2)), heads]
    sizes += [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    numbers = np.arange(np.prod(sizes), dtype=np.uint16).reshape(sizes)
    orders = [each for each in ORDERS if each.index(L) < each.index(H) or sizes[L] == 1]
    return numbers, shares, draw(st.sampled_from(orders))


@given(models(), st.permutations([1, 2, 4, 8, 16]))
def test_every_size_stores_what_every_other_size_loads(
    model: tuple[Numbers, int, list[int]], sizes: list[int]
) -> None:
    numbers, count, order = model
    heads, blocks, others = numbers.shape[H], [3, 0, 4], [1, 2]
    parts: dict[int, bytes] = {}
    formats, pages = set(), set()
    for ranks in sizes:
        try:
            held = [shares_of_rank(heads, count, rank, ranks) for rank in range(ranks)]
        except ConfigError:
            assert max(1, heads // ranks) < heads // count, "it holds whole shares"
            continue
        assert {share.number for shares in held for share in shares} == set(range(count))
        for number, shares in enumerate(held):
            full = rank_of(numbers, number, ranks, order)
            empty = rank_of(np.zeros_like(numbers), number, ranks, order)
            copied = 0
            for share in shares:
                found = full.find(share)
                formats.add(found.page_format)
                pages.add((found.pages, *(each.page_bytes for each in found.segments)))
                part = full.gather(share, blocks)
                assert parts.setdefault(share.number, part) == part
                empty.scatter(share, blocks, part)
                copied += len(part)
            assert (empty.numbers[:, blocks] == full.numbers[:, blocks]).all()
            assert not empty.numbers[:, others].any()
            assert copied == full.numbers[:, blocks].nbytes
    assert len(formats) == len(pages) == 1


def test_sizes_that_hold_whole_shares() -> None:
    assert shares_of_rank(8, 8, 0, 1) == [Share(each, each, 1) for each in range(8)]
    assert shares_of_rank(8, 4, 1, 2) == [Share(2, 0, 2), Share(3, 2, 2)]
    assert shares_of_rank(8, 8, 5, 8) == [Share(5, 0, 1)]
    # Fewer heads than ranks: consecutive ranks have the same one.
    held = [shares_of_rank(2, 2, rank, 8) for rank in range(8)]
    assert held == [[Share(rank // 4, 0, 1)] for rank in range(8)]
    assert [default_shares(heads) for heads in (1, 2, 3, 4, 8, 10, 12, 16, 40)] == [
        1, 2, 1, 4, 8, 2, 4, 8, 8,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "shares", "ranks", "why"),
    [
        (8, 3, 1, "must divide the model's 8 KV heads"),
        (4, 8, 1, "must divide the model's 4 KV heads"),
        (8, 2, 8, "a multiple of 8, so that"),
        (16, 8, 32, "a multiple of 16, so that"),
        (12, 4, 6, "a multiple of 6, so that"),
        (8, 8, 3, "8 KV heads cannot be divided between 3 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(heads: int, shares: int, ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        shares_of_rank(heads, shares, 0, ranks)


def view(shape: list[int], order: list[int], **changes: int) -> TensorView:
    strides = strides_of(order, shape, [0] * len(shape))
    strides = [changes.get(f"stride{dim}", each) for dim, each in enumerate(strides)]
    return TensorView("layer.0", "float16", ITEM, 0, 0, tuple(shape), tuple(strides))


@pytest.mark.parametrize(
    ("tensor", "dim", "why"),
    [
        # Token-major, as FlashAttention's NHD: blocks, tokens, heads, elements.
        (view([5, 16, 4, 8], [0, 1, 2, 3]), 2, "not head-major"),
        (view([5, 2, 16, 4, 8], [0, 1, 2, 3, 4]), 3, "not head-major"),
        # A gap behind each head, as for scales; and one between tokens.
        (view([5, 4, 16, 8], [0, 1, 2, 3], stride0=4 * 272, stride1=272), 1, "not head-major"),
        (view([5, 4, 16, 6], [0, 1, 2, 3], stride0=1024, stride1=256, stride2=16), 1, "head-major"),
        (view([5, 2, 16, 8], [0, 1, 2, 3]), 1, "has no heads 2 to 3"),
        (view([5, 4, 16, 8], [0, 1, 2, 3]), 0, "has no heads 2 to 3"),
    ],
)
def test_pages_that_cannot_be_cut_are_refused(tensor: TensorView, dim: int, why: str) -> None:
    with pytest.raises(DeviceError, match=why):
        find_share([tensor], 5, {"layer.0": dim}, Share(1, 2, 2))


def test_shares_of_a_rank_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, dims = view([5, 4, 16, 8], [0, 1, 2, 3]), {"layer.0": 1}
    one, other = Share(0, 0, 2), Share(1, 2, 2)
    of_one, of_other = (find_share([tensor], 5, dims, each) for each in (one, other))
    assert find_shares([tensor], 5, HeadShares(dims, [one], 2)) == of_one
    both = find_shares([tensor], 5, HeadShares(dims, [one, other], 2))
    assert both == of_one._replace(segments=(*of_one.segments, *of_other.segments))
    monkeypatch.setattr(shares_module, "MAX_SEGMENTS", 2)
    find_shares([tensor], 5, HeadShares(dims, [one, other], 2))
    monkeypatch.setattr(shares_module, "MAX_SEGMENTS", 1)
    with pytest.raises(DeviceError, match="2 segments; at most 1 are"):
        find_shares([tensor], 5, HeadShares(dims, [one, other], 2))


def test_a_layer_that_shares_the_kv_of_another_is_copied_once() -> None:
    one = view([5, 4, 16, 8], [0, 1, 2, 3])
    two = TensorView("layer.1", *(getattr(one, name) for name in list(one.__slots__)[1:]))
    found = find_share([one, two], 5, {"layer.0": 1, "layer.1": 1}, Share(1, 2, 2))
    assert found.segments == find_share([one], 5, {"layer.0": 1}, Share(1, 2, 2)).segments
    assert [(each.offset, each.page_bytes) for each in found.segments] == [(512, 512)]
    assert found.pages == (Pages((1,), "float16", (2, 16, 8)),)


def test_orders_that_pack_differently_have_different_formats() -> None:
    numbers = np.zeros((2, 5, 2, 4, 4, 4), np.uint16)
    formats = {
        Rank(numbers, order).find(Share(0, 0, 2)).page_format
        for order in ([L, B, KV, H, N, C], [L, B, H, KV, N, C], [L, B, H, N, KV, C])
    }
    assert len(formats) == 3
    # What lies outside of a head's run decides nothing.
    alike = {
        Rank(numbers, order).find(Share(0, 0, 2)).page_format
        for order in ([L, B, KV, H, N, C], [L, KV, B, H, N, C], [B, L, KV, H, N, C])
    }
    assert len(alike) == 1
