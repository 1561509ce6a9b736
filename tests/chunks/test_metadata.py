# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.metadata import (
    DTYPE_NAMES,
    MAX_METADATA_BYTES,
    MemoryFormat,
    RemoteMetadata,
    itemsize,
)
from lmcache_redis.errors import FormatError

SIZES = st.integers(0, 4096)
SHAPES = st.one_of(
    st.lists(SIZES, max_size=4), st.lists(st.integers(0, 64), min_size=5, max_size=8)
).map(tuple)
GROUPS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPE_NAMES)), max_size=8).filter(
    lambda groups: sum(8 + 8 * max(4, len(shape)) for shape, _ in groups) <= 320
)

VECTOR = bytes.fromhex(
    "0000040000000000"  # 262,144 bytes
    "524c0000"  # PAGES
    "02000000"  # two groups
    "0300000004000000"  # bfloat16, four dimensions
    "0200000000000000"
    "0400000000000000"
    "1000000000000000"
    "0002000000000000"
    "4000000002000000"  # int8, two dimensions
    "0000010000000000"
    "0200000000000000"
    "0000000000000000"
    "0000000000000000"
)
VECTOR_METADATA = RemoteMetadata(
    262_144, [(2, 4, 16, 512), (65_536, 2)], ["bfloat16", "int8"], MemoryFormat.PAGES
)


@st.composite
def remote_metadata(draw: st.DrawFn) -> RemoteMetadata:
    groups = draw(GROUPS)
    shapes = [shape for shape, _ in groups]
    names = [name for _, name in groups]
    fmt = draw(st.sampled_from(MemoryFormat))
    encoded = fmt in (MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER)
    if groups and all(shapes) and not encoded:
        length = sum(math.prod(shape) * itemsize(name) for shape, name in groups)
    else:
        length = draw(st.integers(0, 2**63 - 1))
    return RemoteMetadata(length, shapes, names, fmt)


def test_memory_formats_have_their_documented_values() -> None:
    assert {name: member.value for name, member in MemoryFormat.__members__.items()} == {
        "UNDEFINED": 0,
        "KV_2LTD": 1,
        "KV_BLOB": 1,
        "KV_T2D": 2,
        "KV_2TD": 3,
        "BINARY": 4,
        "BINARY_BUFFER": 5,
        "KV_MLA_FMT": 6,
        "EC_TD": 7,
        "HS_TD": 8,
        "PAGES": 0x4C52,
    }
    assert MemoryFormat(1) is MemoryFormat.KV_2LTD


class TestRemoteMetadata:
    def test_fixed_vector(self) -> None:
        assert VECTOR_METADATA.serialize() == VECTOR
        assert RemoteMetadata.deserialize(VECTOR) == VECTOR_METADATA
        assert len(VECTOR) == 96

    @given(remote_metadata())
    def test_round_trip(self, metadata: RemoteMetadata) -> None:
        encoded = metadata.serialize()
        again = RemoteMetadata.deserialize(encoded)
        assert again == metadata
        assert hash(again) == hash(metadata)
        assert (again.length, again.fmt) == (metadata.length, metadata.fmt)
        assert (again.shapes, again.dtype_names) == (metadata.shapes, metadata.dtype_names)
        assert again.serialize() == encoded
        sizes = sum(max(4, len(shape)) for shape in metadata.shapes)
        assert len(encoded) == 16 + 8 * len(metadata.shapes) + 8 * sizes
        padded = encoded.ljust(MAX_METADATA_BYTES, b"\0")
        assert RemoteMetadata.deserialize(memoryview(bytearray(padded))) == metadata

    def test_the_largest_has_336_bytes(self) -> None:
        metadata = RemoteMetadata(8, [(1, 1, 1, 1)] * 8, ["uint8"] * 8, MemoryFormat.PAGES)
        assert len(metadata.serialize()) == MAX_METADATA_BYTES == 336
        assert RemoteMetadata.deserialize(metadata.serialize()) == metadata

    def test_torch_dtypes_and_sizes_are_taken_and_given_back(self) -> None:
        torch = pytest.importorskip("torch")
        shape = torch.Size([2, 2, 4, 8])
        metadata = RemoteMetadata(256, [shape], [torch.bfloat16], MemoryFormat.KV_2LTD)
        assert metadata.dtype_names == ("bfloat16",)
        assert metadata.dtypes == (torch.bfloat16,)
        assert metadata.shapes == (shape,)
        assert RemoteMetadata.deserialize(metadata.serialize()).dtypes == (torch.bfloat16,)

    def test_a_length_that_the_shapes_contradict_is_refused(self) -> None:
        with pytest.raises(FormatError, match="a chunk of 7 bytes whose shapes and dtypes need 8"):
            RemoteMetadata(7, [(2,), (2,)], ["float16", "float16"], MemoryFormat.PAGES)

    def test_a_length_that_the_shapes_do_not_decide_is_free(self) -> None:
        assert RemoteMetadata(7, [], [], MemoryFormat.PAGES).length == 7
        assert RemoteMetadata(7, [(2,), ()], ["float16"] * 2, MemoryFormat.PAGES).length == 7
        for fmt in (MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER):
            assert RemoteMetadata(7, [(9, 0, 0, 0)], ["uint8"], fmt).length == 7

    @pytest.mark.parametrize(
        ("length", "shapes", "dtypes", "message"),
        [
            (-1, [], [], "the length of a chunk is -1"),
            (2**63, [], [], "the length of a chunk is"),
            (1.0, [], [], "the length of a chunk is an int"),
            (0, [(1,) * 9], ["uint8"], "a shape has 9 dimensions, at most 8"),
            (8, [(1, 1, 1, 1, 1)] * 8, ["uint8"] * 8, "metadata has 400 bytes, at most 336 fit"),
            (0, [(-1,)], ["uint8"], "a size in a shape is -1"),
            (0, [(2**63,)], ["uint8"], "a size in a shape is"),
            (0, [(None,)], ["uint8"], "a size in a shape is an int, not NoneType"),
            (0, [()] * 9, ["uint8"] * 9, "9 groups, at most 8"),
            (0, [()], ["float3"], "unknown dtype 'float3'"),
            (0, [()], [], "1 shapes but 0 dtypes"),
            (0, [], ["uint8"], "0 shapes but 1 dtypes"),
        ],
    )
    def test_what_cannot_be_encoded_is_refused(
        self, length: int, shapes: list[tuple[int, ...]], dtypes: list[str], message: str
    ) -> None:
        with pytest.raises(FormatError, match=message):
            RemoteMetadata(length, shapes, dtypes, MemoryFormat.PAGES)

    def test_a_format_that_is_none_is_refused(self) -> None:
        with pytest.raises(FormatError, match="a memory format is a MemoryFormat, not int"):
            RemoteMetadata(0, [], [], 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("offset", "field", "message"),
        [
            (0, struct.pack("<Q", 2**63), "the length of a chunk is"),
            (0, struct.pack("<Q", 262_143), "a chunk of 262143 bytes"),
            (8, struct.pack("<I", 9), "unknown memory format 9"),
            (
                12,
                struct.pack("<I", 1),
                "a chunk of 262144 bytes whose shapes and dtypes need 131072",
            ),
            (12, struct.pack("<I", 3), "ends before its 3 groups: it has 96 bytes"),
            (12, struct.pack("<I", 2**32 - 1), "ends before its 4294967295 groups"),
            (16, struct.pack("<I", 0), "unknown dtype code 0"),
            (16, struct.pack("<I", 9), "unknown dtype code 9"),
            (20, struct.pack("<I", 5), "ends before its 2 groups: it has 96 bytes"),
            (20, struct.pack("<I", 9), "a group has 9 dimensions, at most 8"),
            (20, struct.pack("<I", 3), "a group of 3 dimensions"),
            (20, struct.pack("<I", 2**32 - 1), "a group has 4294967295 dimensions"),
            (24, struct.pack("<Q", 2**64 - 1), "a size in a shape is"),
            (24, struct.pack("<4Q", *[2**62] * 4), "whose shapes and dtypes need"),
        ],
    )
    def test_what_no_encoding_holds_is_refused(
        self, offset: int, field: bytes, message: str
    ) -> None:
        encoded = bytearray(VECTOR)
        encoded[offset : offset + len(field)] = field
        with pytest.raises(FormatError, match=message):
            RemoteMetadata.deserialize(encoded)

    def test_another_length_of_bytes_is_refused(self) -> None:
        for length in range(len(VECTOR)):
            with pytest.raises(FormatError):
                RemoteMetadata.deserialize(VECTOR[:length])
        with pytest.raises(FormatError, match="16 to 336 bytes, not 337"):
            RemoteMetadata.deserialize(VECTOR.ljust(337, b"\0"))
        for rest in (b"\1", b"\0\0\1", b"\1".rjust(336 - len(VECTOR), b"\0")):
            with pytest.raises(FormatError, match="followed by bytes that are not zero"):
                RemoteMetadata.deserialize(VECTOR + rest)

    def test_every_changed_byte_is_refused_or_seen(self) -> None:
        for position in range(len(VECTOR)):
            for value in range(256):
                changed = bytearray(VECTOR)
                changed[position] = value
                try:
                    metadata = RemoteMetadata.deserialize(changed)
                except FormatError:
                    continue
                assert (metadata == VECTOR_METADATA) == (changed == VECTOR)
                assert RemoteMetadata.deserialize(metadata.serialize()) == metadata

    @given(st.binary(max_size=400))
    def test_random_bytes_are_refused_or_understood(self, data: bytes) -> None:
        try:
            metadata = RemoteMetadata.deserialize(data)
        except FormatError:
            return
        assert RemoteMetadata.deserialize(metadata.serialize()) == metadata
