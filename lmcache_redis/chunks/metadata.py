"""Metadata of a chunk: length, shapes, dtypes and memory format. Free of torch.

`RemoteMetadata` is encoded little-endian and unaligned (docs/reference/value-format.md):

    u64 length | u32 memory format | u32 groups
    per group: u32 dtype code | u32 dimensions | u64 sizes

A group has at least four sizes, zero where unused, and at most eight. At most 8 groups and 336
bytes. LMCache's TCP protocol has an encoding of its own (`lmcache_redis.compat.lm_wire`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_redis.chunks.dtypes import (
    ENCODED_FORMATS,
    MemoryFormat,
    dtype_code,
    dtype_from_code,
    dtype_name,
    itemsize,
    torch_dtype,
)
from lmcache_redis.errors import FormatError, check_int, checked_shape

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_DIMS",
    "MAX_GROUPS",
    "MAX_METADATA_BYTES",
    "MAX_SIZE",
    "MemoryFormat",
    "RemoteMetadata",
]

MAX_GROUPS = 8
MAX_DIMS = 8
MAX_SIZE = (1 << 63) - 1

_FIXED = struct.Struct("<QII")
_GROUP = struct.Struct("<II")
_LEAST_SIZES = 4
_SIZES = {count: struct.Struct(f"<{count}Q") for count in range(_LEAST_SIZES, MAX_DIMS + 1)}
MAX_METADATA_BYTES = _FIXED.size + MAX_GROUPS * (_GROUP.size + _SIZES[_LEAST_SIZES].size)


@dataclass(frozen=True, slots=True, init=False)
class RemoteMetadata:
    """Length in bytes, shapes, dtypes and memory format of a chunk.

    One shape and one dtype for each group: at most 8 groups of at most 8 dimensions. An empty shape
    means that the shape is not given. If every shape is given, length must be the size that follows
    from them, unless the format is BINARY or BINARY_BUFFER. Raises FormatError for anything that
    cannot be encoded.
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
        check_int("the length of a chunk", length, 0, MAX_SIZE)
        if not isinstance(fmt, MemoryFormat):
            raise FormatError(f"a memory format is a MemoryFormat, not {type(fmt).__name__}")
        sizes = tuple(map(_checked_shape, shapes))
        names = tuple(map(dtype_name, dtypes))
        if len(sizes) != len(names):
            raise FormatError(f"{len(sizes)} shapes but {len(names)} dtypes: give one per group")
        if len(sizes) > MAX_GROUPS:
            raise FormatError(f"{len(sizes)} groups, at most {MAX_GROUPS} can be encoded")
        if sizes and () not in sizes and fmt not in ENCODED_FORMATS:
            needed = sum(
                math.prod(shape) * itemsize(name) for shape, name in zip(sizes, names, strict=True)
            )
            if needed != length:
                raise FormatError(
                    f"a chunk of {length} bytes whose shapes and dtypes need {needed}"
                )
        nbytes = _FIXED.size + sum(map(_group_bytes, sizes))
        if nbytes > MAX_METADATA_BYTES:
            raise FormatError(f"metadata of {nbytes} bytes, at most {MAX_METADATA_BYTES} fit")
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "shapes", sizes)
        object.__setattr__(self, "dtype_names", names)
        object.__setattr__(self, "fmt", fmt)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each group as ``torch.dtype``; imports torch."""
        return tuple(map(torch_dtype, self.dtype_names))

    def serialize(self) -> bytes:
        """The encoding: 16 bytes, and 40 per group of at most 4 dimensions."""
        encoded = _FIXED.pack(self.length, self.fmt.value, len(self.shapes))
        for shape, name in zip(self.shapes, self.dtype_names, strict=True):
            padded = shape + (0,) * (_LEAST_SIZES - len(shape))
            encoded += _GROUP.pack(dtype_code(name), len(shape)) + _SIZES[len(padded)].pack(*padded)
        return encoded

    @staticmethod
    def deserialize(data: bytes | bytearray | memoryview) -> RemoteMetadata:
        """Decodes metadata; zero padding up to 336 bytes is allowed.

        Raises FormatError for any other bytes.
        """
        raw = bytes(memoryview(data))
        if not _FIXED.size <= len(raw) <= MAX_METADATA_BYTES:
            raise FormatError(
                f"metadata has {_FIXED.size} to {MAX_METADATA_BYTES} bytes, not {len(raw)}"
            )
        found = RemoteMetadata.at_start_of(raw)
        if any(raw[len(found.serialize()) :]):
            raise FormatError("metadata is followed by bytes that are not zero")
        return found

    @staticmethod
    def at_start_of(data: bytes | bytearray | memoryview) -> RemoteMetadata:
        """Decodes the metadata with which a buffer begins, whatever follows.

        Raises FormatError for any other bytes.
        """
        raw = bytes(memoryview(data).cast("B")[:MAX_METADATA_BYTES])
        if len(raw) < _FIXED.size:
            raise FormatError(f"metadata has at least {_FIXED.size} bytes, not {len(raw)}")
        length, fmt_value, group_count = _FIXED.unpack_from(raw)
        if group_count > MAX_GROUPS:
            raise FormatError(f"metadata of {group_count} groups in {len(raw)} bytes")
        try:
            fmt = MemoryFormat(fmt_value)
        except ValueError:
            raise FormatError(f"unknown memory format {fmt_value}") from None
        shapes: list[tuple[int, ...]] = []
        names: list[str] = []
        end = _FIXED.size
        for _ in range(group_count):
            try:
                code, dims = _GROUP.unpack_from(raw, end)
                encoding = _SIZES.get(max(dims, _LEAST_SIZES))
                if encoding is None:
                    raise FormatError(f"a group of {dims} dimensions, at most {MAX_DIMS}")
                sizes = encoding.unpack_from(raw, end + _GROUP.size)
            except struct.error:
                raise FormatError(f"metadata of {group_count} groups in {len(raw)} bytes") from None
            if any(sizes[dims:]):
                raise FormatError(f"a group of {dims} dimensions has the sizes {list(sizes)}")
            end += _GROUP.size + encoding.size
            names.append(dtype_from_code(code))
            shapes.append(sizes[:dims])
        return RemoteMetadata(length, shapes, names, fmt)


def _group_bytes(shape: Sequence[int]) -> int:
    return _GROUP.size + _SIZES[max(len(shape), _LEAST_SIZES)].size


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = checked_shape(shape, MAX_SIZE)
    if len(sizes) > MAX_DIMS:
        raise FormatError(f"a shape of {len(sizes)} dimensions, at most {MAX_DIMS} can be encoded")
    return sizes
