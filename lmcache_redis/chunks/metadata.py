# SPDX-License-Identifier: Apache-2.0
"""Metadata of a chunk: length, shapes, dtypes and memory format. Only `torch_dtype` imports torch.

`RemoteMetadata` is encoded little-endian and unaligned (docs/reference/value-format.md):

    u64 length | u32 memory format | u32 groups
    per group: u32 dtype code | u32 dimensions | u64 sizes

A group has at least four sizes, zero where unused, and at most eight. At most 8 groups and 336
bytes. LMCache's TCP protocol has an encoding of its own (`lmcache_redis.compat.lm_wire`).

A dtype is named as in torch, without the module, for instance ``"bfloat16"``. The meaning of a code
never changes, because stored values contain codes. Dtype codes below 64 and formats below 16 are
those of LMCache; 0 is no dtype, which no stored chunk has.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from lmcache_redis.errors import FormatError, check_int, checked_shape

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 8
MAX_DIMS = 8
MAX_SIZE = (1 << 63) - 1

_FIXED = struct.Struct("<QII")
_GROUP = struct.Struct("<II")
_LEAST_SIZES = 4
_SIZES = {count: struct.Struct(f"<{count}Q") for count in range(_LEAST_SIZES, MAX_DIMS + 1)}
MAX_METADATA_BYTES = _FIXED.size + MAX_GROUPS * (_GROUP.size + _SIZES[_LEAST_SIZES].size)


class MemoryFormat(enum.Enum):
    """Arrangement of a chunk's elements."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, layers, tokens, hidden]
    KV_BLOB = 1
    KV_T2D = 2  # [tokens, 2, hidden]
    KV_2TD = 3  # [2, tokens, hidden]
    BINARY = 4  # encoded bytes; the shape is that of the decoded tensor
    BINARY_BUFFER = 5  # as BINARY
    KV_MLA_FMT = 6  # [1, layers, tokens, head size]
    EC_TD = 7  # [tokens, hidden] of an encoder cache
    HS_TD = 8  # [tokens, hidden] of hidden states
    PAGES = 0x4C52  # an engine's pages, see docs/reference/value-format.md


# The length of encoded bytes does not follow from their shape and dtype.
ENCODED_FORMATS = frozenset({MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER})

_CODE_AND_ITEMSIZE: dict[str, tuple[int, int]] = {
    "float16": (2, 2),
    "bfloat16": (3, 2),
    "float32": (4, 4),
    "float64": (5, 8),
    "uint8": (6, 1),
    "float8_e4m3fn": (7, 1),
    "float8_e5m2": (8, 1),
    "int8": (64, 1),
    "int16": (65, 2),
    "int32": (66, 4),
    "int64": (67, 8),
    "uint16": (68, 2),
    "uint32": (69, 4),
    "uint64": (70, 8),
    "bool": (71, 1),
    "float8_e4m3fnuz": (72, 1),
    "float8_e5m2fnuz": (73, 1),
    "float8_e8m0fnu": (74, 1),
}
NO_DTYPE = 0
NAME_OF_CODE: dict[int, str] = {
    1: "float16",  # torch.half in LMCache: read, never written
    **{code: name for name, (code, _) in _CODE_AND_ITEMSIZE.items()},
}

DTYPE_NAMES: tuple[str, ...] = tuple(_CODE_AND_ITEMSIZE)


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype without torch, also of a ``torch.dtype``. Raises FormatError."""
    kind = type(dtype)
    if not isinstance(dtype, str) and (kind.__module__, kind.__name__) != ("torch", "dtype"):
        raise FormatError(f"a dtype is a torch.dtype or its name, not {kind.__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in _CODE_AND_ITEMSIZE:
        raise FormatError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_NAMES)}")
    return name


def dtype_from_code(code: int) -> str:
    """The name of a code. Raises FormatError for an unknown code."""
    name = NAME_OF_CODE.get(code)
    if name is None:
        raise FormatError(f"unknown dtype code {code}")
    return name


def itemsize(name: torch.dtype | str) -> int:
    """Bytes per element. Raises FormatError for an unknown dtype."""
    return _CODE_AND_ITEMSIZE[dtype_name(name)][1]


def torch_dtype(name: torch.dtype | str) -> torch.dtype:
    """The ``torch.dtype`` of a name; imports torch. Raises FormatError if one does not know it."""
    import torch

    known = dtype_name(name)
    found = getattr(torch, known, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {known!r}")
    return found


class MetadataFields(NamedTuple):
    """What the encoding can say of a chunk; `RemoteMetadata` is what can be true of one.

    dtype_names: one for each shape; None for no dtype.
    """

    length: int
    shapes: tuple[tuple[int, ...], ...]
    dtype_names: tuple[str | None, ...]
    fmt: MemoryFormat

    @classmethod
    def of(
        cls,
        length: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype | str | None],
        fmt: MemoryFormat,
    ) -> MetadataFields:
        """Raises FormatError for what cannot be encoded."""
        check_int("the length of a chunk", length, 0, MAX_SIZE)
        if not isinstance(fmt, MemoryFormat):
            raise FormatError(f"a memory format is a MemoryFormat, not {type(fmt).__name__}")
        sizes = tuple(checked_shape(shape, MAX_SIZE) for shape in shapes)
        dims = max(map(len, sizes), default=0)
        if dims > MAX_DIMS:
            raise FormatError(f"a shape has {dims} dimensions, at most {MAX_DIMS} can be encoded")
        names = tuple(None if each is None else dtype_name(each) for each in dtypes)
        if len(sizes) != len(names):
            raise FormatError(f"{len(sizes)} shapes but {len(names)} dtypes: give one per group")
        if len(sizes) > MAX_GROUPS:
            raise FormatError(
                f"metadata has {len(sizes)} groups, at most {MAX_GROUPS} can be encoded"
            )
        fields = cls(length, sizes, names, fmt)
        if len(encoded := fields.encoded()) > MAX_METADATA_BYTES:
            raise FormatError(
                f"metadata has {len(encoded)} bytes, at most {MAX_METADATA_BYTES} fit"
            )
        return fields

    def encoded(self) -> bytes:
        """16 bytes, and 40 per group of at most 4 dimensions."""
        encoded = _FIXED.pack(self.length, self.fmt.value, len(self.shapes))
        for shape, name in zip(self.shapes, self.dtype_names, strict=True):
            code = NO_DTYPE if name is None else _CODE_AND_ITEMSIZE[name][0]
            padded = shape + (0,) * (_LEAST_SIZES - len(shape))
            encoded += _GROUP.pack(code, len(shape)) + _SIZES[len(padded)].pack(*padded)
        return encoded

    @classmethod
    def at_start_of(cls, data: bytes | bytearray | memoryview) -> MetadataFields:
        """Those with whose encoding a buffer begins. Raises FormatError if there are none."""
        raw = bytes(memoryview(data).cast("B")[:MAX_METADATA_BYTES])
        if len(raw) < _FIXED.size:
            raise FormatError(f"metadata has at least {_FIXED.size} bytes, not {len(raw)}")
        length, fmt_value, group_count = _FIXED.unpack_from(raw)
        try:
            fmt = MemoryFormat(fmt_value)
        except ValueError:
            raise FormatError(f"unknown memory format {fmt_value}") from None
        shapes: list[tuple[int, ...]] = []
        names: list[str | None] = []
        end = _FIXED.size
        for _ in range(group_count):
            try:
                code, dims = _GROUP.unpack_from(raw, end)
                encoding = _SIZES.get(max(dims, _LEAST_SIZES))
                if encoding is None:
                    raise FormatError(
                        f"a group has {dims} dimensions, at most {MAX_DIMS} are allowed"
                    )
                sizes = encoding.unpack_from(raw, end + _GROUP.size)
            except struct.error:
                raise FormatError(
                    f"metadata ends before its {group_count} groups: it has {len(raw)} bytes"
                ) from None
            if any(sizes[dims:]):
                raise FormatError(f"a group of {dims} dimensions has more sizes: {list(sizes)}")
            end += _GROUP.size + encoding.size
            names.append(None if code == NO_DTYPE else dtype_from_code(code))
            shapes.append(sizes[:dims])
        return cls.of(length, shapes, names, fmt)


@dataclass(frozen=True, slots=True, init=False)
class RemoteMetadata:
    """Length in bytes, shapes, dtypes and memory format of a chunk.

    One shape and one dtype for each group: at most 8 groups of at most 8 dimensions. An empty shape
    means that the shape is not given. If every shape is given, length must be the size that follows
    from them, unless the format is BINARY or BINARY_BUFFER. Raises FormatError for anything else.
    """

    length: int
    shapes: tuple[tuple[int, ...], ...]
    dtype_names: tuple[str, ...]
    fmt: MemoryFormat

    def __init__(
        self,
        length: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype | str],
        fmt: MemoryFormat,
    ) -> None:
        fields = MetadataFields.of(length, shapes, dtypes, fmt)
        names = tuple(name for name in fields.dtype_names if name is not None)
        if len(names) < len(fields.shapes):
            raise FormatError(f"a chunk has dtypes: unknown dtype code {NO_DTYPE}")
        sizes = fields.shapes
        if sizes and () not in sizes and fmt not in ENCODED_FORMATS:
            needed = sum(
                math.prod(shape) * itemsize(name) for shape, name in zip(sizes, names, strict=True)
            )
            if needed != length:
                raise FormatError(
                    f"a chunk of {length} bytes whose shapes and dtypes need {needed}"
                )
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "shapes", sizes)
        object.__setattr__(self, "dtype_names", names)
        object.__setattr__(self, "fmt", fmt)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each group as ``torch.dtype``; imports torch."""
        return tuple(map(torch_dtype, self.dtype_names))

    def serialize(self) -> bytes:
        """The encoding, as `MetadataFields.encoded`."""
        return MetadataFields(self.length, self.shapes, self.dtype_names, self.fmt).encoded()

    @staticmethod
    def deserialize(data: bytes | bytearray | memoryview) -> RemoteMetadata:
        """Decodes metadata, padded with zeros or not. Raises FormatError for any other bytes."""
        raw = bytes(memoryview(data))
        if not _FIXED.size <= len(raw) <= MAX_METADATA_BYTES:
            raise FormatError(
                f"metadata has {_FIXED.size} to {MAX_METADATA_BYTES} bytes, not {len(raw)}"
            )
        length, shapes, names, fmt = MetadataFields.at_start_of(raw)
        found = RemoteMetadata(length, shapes, cast("Sequence[str]", names), fmt)
        if any(raw[len(found.serialize()) :]):
            raise FormatError("metadata is followed by bytes that are not zero")
        return found
