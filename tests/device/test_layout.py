# SPDX-License-Identifier: Apache-2.0
"""Layouts: what the fingerprint covers, what the check refuses, what coalescing merges."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import Reach
from lmcache_redis.device.layout import (
    MAX_SEGMENTS,
    KVLayout,
    MergedAt,
    Pages,
    Segment,
    coalesce,
    distinct,
    named_pairs,
)
from lmcache_redis.errors import ConfigError, DeviceError, FormatError
from tests.device.layouts import Paged, paged

LAYOUT = KVLayout(
    identity=(("model", "m"), ("rank", "0")),
    dtype="float16",
    device="cpu",
    block_size_tokens=16,
    num_blocks=4,
    segments=(Segment(0, 0, 64, 64), Segment(1, 8, 32, 40)),
    page_format="f",
)


def changed(**fields: object) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **fields)


class TestSizes:
    def test_of_a_chunk(self) -> None:
        assert LAYOUT.block_bytes == 96
        assert LAYOUT.blocks_per_part(256) == 16
        assert LAYOUT.blocks_per_part(16) == 1
        assert LAYOUT.metadata(256).length == 1536

    @pytest.mark.parametrize("chunk_size_tokens", [8, 24, 0, -16])
    def test_chunk_that_holds_no_whole_blocks(self, chunk_size_tokens: int) -> None:
        with pytest.raises(ConfigError, match=rf"{chunk_size_tokens} tokens.*16 tokens"):
            LAYOUT.blocks_per_part(chunk_size_tokens)


class TestMetadata:
    """Sixteen blocks a chunk; pages of 64 and 32 bytes."""

    def test_names_what_the_pages_hold(self) -> None:
        pages = (Pages((1,), "float16", (2, 4, 4)), Pages((1,), "int8", (32,)))
        changed(pages=pages).check([64 * 4, 40 * 4])
        assert changed(pages=pages).metadata(256) == RemoteMetadata(
            1536, [(1, 16, 2, 4, 4), (1, 16, 32)], ["float16", "int8"], MemoryFormat.PAGES
        )

    def test_names_the_dimensions_between_tensors_and_blocks(self) -> None:
        both = changed(segments=(Segment(0, 0, 64, 64),) * 4, pages=(Pages((2, 2), "int8", (64,)),))
        assert both.metadata(256).shapes == ((2, 2, 16, 64),)

    @pytest.mark.parametrize(
        "pages",
        [
            (),
            (Pages((1,), "float16", (1, 1, 1, 1, 1, 1, 32)), Pages((1,), "int8", (32,))),
        ],
    )
    def test_is_bytes_where_they_cannot_be_told(self, pages: tuple[Pages, ...]) -> None:
        opaque = RemoteMetadata(1536, [(1536,)], ["uint8"], MemoryFormat.PAGES)
        assert changed(pages=pages).metadata(256) == opaque

    def test_is_not_part_of_the_fingerprint(self) -> None:
        pages = (Pages((1,), "float16", (32,)), Pages((1,), "float16", (16,)))
        assert changed(pages=pages).fingerprint(256) == LAYOUT.fingerprint(256)

    @pytest.mark.parametrize(
        "pages",
        [
            (Pages((2,), "float16", (32,)),),
            (Pages((1,), "float16", (32,)),),
            (Pages((1,), "float16", (32,)), Pages((2,), "float16", (16,))),
            (Pages((1 << 60,), "float16", (32,)),),
            (Pages((-1,), "float16", (32,)),),
            (Pages((0,), "int8", (1,)), Pages((1,), "int8", (64,)), Pages((1,), "int8", (32,))),
            (Pages((3,), "int8", (64,)), Pages((-1,), "int8", (32,))),
            (Pages((1 << 60,) * 8, "float16", (32,)),),
            (Pages((-1, -2), "float16", (32,)),),
            (Pages((1,), "float3", (32,)), Pages((1,), "float16", (16,))),
        ],
    )
    def test_that_contradicts_the_segments_is_refused(self, pages: tuple[Pages, ...]) -> None:
        with pytest.raises(DeviceError, match=r"layout('s| whose) pages"):
            changed(pages=pages).check([64 * 4, 40 * 4])

    @pytest.mark.parametrize("count", [2, 1 << 60])
    def test_no_more_is_made_of_it_than_there_are_segments(self, count: int) -> None:
        pages = (Pages((1,), "float16", (32,)), Pages((count,), "float16", (16,)))
        with pytest.raises(DeviceError, match=f"fill {count} segments where 1 are left"):
            changed(pages=pages).check([64 * 4, 40 * 4])


class TestFingerprint:
    def test_is_fixed(self) -> None:
        """A change here orphans every stored chunk."""
        canonical = b'[[["model","m"],["rank","0"]],"float16",16,256,"f",[64,32]]'
        digest = hashlib.blake2b(canonical, digest_size=32, person=b"lmcr-layout-1")
        assert LAYOUT.fingerprint(256) == digest.digest()

    @pytest.mark.parametrize(
        "same",
        [
            changed(identity=(("rank", "0"), ("model", "m"))),
            changed(device="cuda"),
            changed(num_blocks=9),
            changed(segments=(Segment(1, 64, 64, 128), Segment(0, 0, 32, 32))),
        ],
    )
    def test_does_not_cover_where_pages_lie(self, same: KVLayout) -> None:
        assert same.fingerprint(256) == LAYOUT.fingerprint(256)

    @pytest.mark.parametrize(
        "other",
        [
            changed(identity=(("model", "m"), ("rank", "1"))),
            changed(identity=(("model", "m"),)),
            changed(identity=(("model", "mrank"), ("", "0"))),
            changed(dtype="bfloat16"),
            changed(block_size_tokens=32),
            changed(page_format="g"),
            changed(segments=LAYOUT.segments[::-1]),
            changed(segments=LAYOUT.segments[:1]),
        ],
    )
    def test_covers_what_decides_the_bytes(self, other: KVLayout) -> None:
        assert other.fingerprint(256) != LAYOUT.fingerprint(256)
        assert LAYOUT.fingerprint(512) != LAYOUT.fingerprint(256)

    def test_any_text_has_one(self) -> None:
        assert len(changed(identity=(("ä\x00\ud800", "\n"),)).fingerprint(256)) == 32


class TestNamedPairs:
    def test_of_layouts(self) -> None:
        pairs = {
            "model": "m",
            "rank": "0",
            "dtype": "float16",
            "block_size_tokens": "16",
            "chunk_size_tokens": "256",
            "page_format": "f",
            "pages": "1 of 64 bytes, 2 of 32 bytes",
        }
        segments = (*LAYOUT.segments, LAYOUT.segments[1])
        assert named_pairs(changed(segments=segments).canonical(256)) == pairs
        window = changed(segments=segments, reach=Reach("window", 33))
        reach = {"reach": "window", "blocks_per_part": "2"}
        assert named_pairs(window.canonical(256)) == pairs | reach

    @pytest.mark.parametrize(
        "canonical",
        [
            b"", b"{}", b"[]", b"[1,2,3,4,5,6]", b"\xff", b"[" * 10**5,
            b'[[["a"]],"u",16,64,"",[1]]',
            b'[[["a","b\\u001b[2J"]],"u",16,64,"",[1]]',
            b'[[["a",7]],"u",16,64,"",[1]]',
            b'[[],"u",16,64,"",[1],"window"]',
        ],
    )  # fmt: skip
    def test_of_what_describes_no_layout(self, canonical: bytes) -> None:
        with pytest.raises(FormatError):
            named_pairs(canonical)


class TestCheck:
    @given(paged())
    def test_accepts_what_fits(self, case: Paged) -> None:
        case.layout.check(case.sizes)

    def test_accepts_as_much_as_there_may_be(self) -> None:
        segments = (Segment(0, 0, 8, 8),) * MAX_SEGMENTS
        changed(block_size_tokens=2**31 - 1, segments=segments).check([32])
        changed(num_blocks=1, segments=(Segment(0, 2**63 - 9, 8, 8),)).check([2**64])
        changed(block_size_tokens=1).check([2**40, 2**40])
        changed(shares=2, segments=LAYOUT.segments * 2).check([2**40, 2**40])

    @given(paged(), st.data())
    def test_refuses_storages_that_are_too_short(self, case: Paged, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(case.layout.segments))
        end = segment.offset + (case.layout.num_blocks - 1) * segment.block_stride
        sizes = case.sizes
        sizes[segment.storage] = end + segment.page_bytes - 1
        with pytest.raises(DeviceError, match="ends at byte"):
            case.layout.check(sizes)

    @pytest.mark.parametrize(
        ("segment", "reason"),
        [
            (Segment(2, 0, 8, 8), "storage 2 of 2"),
            (Segment(-1, 0, 8, 8), "storage -1 of 2"),
            (Segment(0, 0, 0, 8), "empty pages"),
            (Segment(0, 0, -8, 8), "empty pages"),
            (Segment(0, -8, 8, 8), "before its storage"),
            (Segment(0, 0, 8, 7), "overlap"),
            (Segment(0, 0, 8, -8), "overlap"),
            (Segment(0, 0, 8, 2**62), "ends at byte"),
            (Segment(0, 2**63 - 1, 8, 8), "ends at byte"),
        ],
    )
    def test_refuses_a_segment(self, segment: Segment, reason: str) -> None:
        with pytest.raises(DeviceError, match=reason):
            changed(segments=(segment,)).check([2**62, 2**62])

    def test_refuses_ends_beyond_an_address(self) -> None:
        with pytest.raises(DeviceError, match="ends at byte"):
            changed(segments=(Segment(0, 2**63 - 8, 8, 8),), num_blocks=1).check([2**64])

    @pytest.mark.parametrize(
        "layout",
        [
            changed(device="tpu"),
            changed(num_blocks=0),
            changed(num_blocks=2**63),
            changed(block_size_tokens=0),
            changed(block_size_tokens=2**31),
            changed(segments=()),
            changed(segments=(Segment(0, 0, 8, 8),) * (MAX_SEGMENTS + 1)),
            changed(identity=(("model", "m"), ("model", "n"))),
            changed(shares=-1),
            changed(shares=2),  # of other pages
            changed(shares=2, segments=(LAYOUT.segments[0],) * 3),
        ],
    )
    def test_refuses_a_layout(self, layout: KVLayout) -> None:
        with pytest.raises(DeviceError):
            layout.check([2**40, 2**40])


def test_the_layout_of_one_share() -> None:
    several = changed(shares=3, segments=LAYOUT.segments * 3)
    assert several.share == changed(shares=1)
    assert several.fingerprint(256) == LAYOUT.fingerprint(256)
    assert LAYOUT.share == LAYOUT


def test_unknown_fields_are_refused() -> None:
    fields = msgspec.to_builtins(LAYOUT) | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, KVLayout)


class TestCoalesce:
    def test_packed_layers_become_one_segment(self) -> None:
        layers = [Segment(0, 100 + 8 * layer, 8, 32) for layer in range(4)]
        assert coalesce(layers)[0] == (Segment(0, 100, 32, 32),)

    def test_touching_only_across_blocks_stays_apart(self) -> None:
        layers = [Segment(0, 0, 8, 8), Segment(0, 8, 8, 8)]
        assert coalesce(layers)[0] == tuple(layers)

    def test_padding_other_strides_and_other_storages_stay_apart(self) -> None:
        layers = [
            Segment(0, 0, 8, 64), Segment(0, 9, 8, 64), Segment(0, 17, 8, 65), Segment(1, 17, 8, 64)
        ]  # fmt: skip
        assert coalesce(layers)[0] == tuple(layers)

    def test_stands_where_its_first_part_stood(self) -> None:
        other = Segment(1, 0, 8, 8)
        late = [Segment(0, 8, 8, 32), other, Segment(0, 0, 8, 32)]
        merged, locations = coalesce(late)
        assert merged == (Segment(0, 0, 16, 32), other)
        assert locations == (MergedAt(0, 8), MergedAt(1, 0), MergedAt(0, 0))

    def test_the_order_is_kept(self) -> None:
        apart = [Segment(0, 16, 8, 32), Segment(1, 0, 8, 32), Segment(0, 0, 8, 32)]
        assert coalesce(apart)[0] == tuple(apart)

    def test_layers_that_share_a_cache_are_copied_once(self) -> None:
        layers = [Segment(0, 0, 8, 16), Segment(0, 8, 8, 16)]
        assert coalesce(layers * 2)[0] == (Segment(0, 0, 16, 16),)
        alone, places = distinct(layers * 2)
        assert alone == tuple(layers)
        assert places == (MergedAt(0, 0), MergedAt(1, 0)) * 2

    @given(paged())
    def test_covers_the_same_bytes_in_no_more_segments(self, case: Paged) -> None:
        before = case.layout.segments
        merged, locations = coalesce(before)
        assert len(merged) <= len(before)
        assert covered(merged) == covered(before)
        for segment, location in zip(before, locations, strict=True):
            whole = merged[location.segment]
            assert segment.storage == whole.storage
            assert segment.offset == whole.offset + location.offset
            assert location.offset + segment.page_bytes <= whole.page_bytes
        assert coalesce(merged)[0] == merged
        msgspec.structs.replace(case.layout, segments=merged).check(case.sizes)


def covered(segments: tuple[Segment, ...]) -> list[tuple[int, int, int]]:
    return sorted(
        (s.storage, s.block_stride, s.offset + byte)
        for s in segments
        for byte in range(s.page_bytes)
    )
