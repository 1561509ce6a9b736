# SPDX-License-Identifier: Apache-2.0
"""From tensors to segments: find the block dimension, and cut each block into pages.

One dimension of each tensor must count blocks. A block's contents are opaque bytes: one page if
they are dense, otherwise one segment for each dense run (two if K and V are the outer dimension).
Pure arithmetic over shapes and strides. A tensor that fits no rule is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lmcache_redis.chunks.metadata import dtype_name
from lmcache_redis.device.layout import (
    MAX_SEGMENTS,
    MergedAt,
    Pages,
    Segment,
    coalesce,
    distinct,
)
from lmcache_redis.errors import DeviceError, FormatError

if TYPE_CHECKING:
    import torch

_MAX_PIECES = 1 << 20  # before pieces that touch are merged


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in the storage with index ``storage``; ``offset`` and ``strides`` in bytes."""

    name: str
    dtype: str
    itemsize: int
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, dtype: str, storage: int) -> TensorView:
        itemsize = tensor.element_size()
        return cls(
            name=name,
            dtype=dtype,
            itemsize=itemsize,
            storage=storage,
            offset=tensor.storage_offset() * itemsize,
            shape=tuple(tensor.shape),
            strides=tuple(stride * itemsize for stride in tensor.stride()),
        )

    def refuse(self, reason: str) -> DeviceError:
        """The error for a tensor that cannot be used: it names shape, strides and dtype."""
        return DeviceError(
            f"KV cache tensor {self.name!r} {reason} (shape {list(self.shape)}, strides "
            f"{list(self.strides)} bytes, {self.dtype})"
        )


class Dim(NamedTuple):
    """One dimension inside a block: ``size`` steps of ``stride`` bytes."""

    size: int
    stride: int


class PagedSegments(NamedTuple):
    """What `find_segments` found; ``page_format`` and ``pages`` as in `KVLayout`."""

    segments: tuple[Segment, ...]
    page_format: str
    pages: tuple[Pages, ...]


class _Blocks(NamedTuple):
    """A tensor's blocks, ``stride`` bytes apart, cut into pages: one for each index of ``outer``.

    in_page, outer: dimensions in the tensor's order, sizes above 1.
    """

    view: TensorView
    stride: int
    page_bytes: int
    in_page: tuple[Dim, ...]
    outer: tuple[Dim, ...]

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.outer)


def find_segments(
    views: Sequence[TensorView],
    num_blocks: int,
    block_strides: Mapping[str, int] | None = None,
    page_bytes: Mapping[str, int] | None = None,
) -> PagedSegments:
    """Coalesced segments that cover every byte of every tensor, and no other.

    views: tensors in chunk order. Two names for one tensor are copied once. num_blocks: blocks as
    the engine numbers them. block_strides: bytes from block to block, by tensor name, if the engine
    reports them. They decide which dimension counts blocks if several have that size. With them, a
    dimension of a multiple of that size may count equal, consecutive parts of blocks. page_bytes:
    of each page, by tensor name, if pages are not to depend on what touches them: then they are not
    merged either. Raises DeviceError if no dimension or more than one can count blocks, a tensor
    overlaps itself or has no such pages, or more than 65,536 segments are needed. The message names
    the tensor and its shape.
    """
    if num_blocks <= 0:
        raise DeviceError(f"a KV cache has at least one block, not {num_blocks}")
    hints, sizes = block_strides or {}, page_bytes or {}
    tensors = [
        _blocks(view, num_blocks, hints.get(view.name), sizes.get(view.name)) for view in views
    ]
    pieces = [math.prod(each.outer_sizes) for each in tensors]
    if sum(pieces) > _MAX_PIECES:
        raise _scattered(views, pieces, sum(pieces), _MAX_PIECES)
    merge = distinct if page_bytes else coalesce
    segments, merged = merge([piece for each in tensors for piece in _segments(each)])
    if len(segments) > MAX_SEGMENTS:
        raise _scattered(views, pieces, len(segments), MAX_SEGMENTS)
    person = b"lmcr-shares-1" if page_bytes else b"lmcr-pages-1"
    digest = hashlib.blake2b(digest_size=16, person=person)
    locations = iter(merged)
    elements: list[Pages] = []
    for each, count in zip(tensors, pieces, strict=True):
        at = list(itertools.islice(locations, count))
        description = [each.view.name, each.view.dtype, each.in_page, each.outer_sizes, at]
        digest.update(json.dumps(description, separators=(",", ":")).encode("ascii"))
        elements += [_elements(each)] * count
    return PagedSegments(segments, digest.hexdigest(), _pages(segments, merged, elements))


def _elements(blocks: _Blocks) -> Pages:
    """What the pages of one tensor hold."""
    dims = sorted(blocks.in_page, key=lambda dim: dim.stride, reverse=True)
    return Pages((1, *blocks.outer_sizes), blocks.view.dtype, tuple(dim.size for dim in dims))


def _pages(
    segments: Sequence[Segment], merged: Sequence[MergedAt], elements: Sequence[Pages]
) -> tuple[Pages, ...]:
    """What the pages of merged segments hold; empty if a page holds parts of several kinds."""
    parts: list[dict[int, Pages]] = [{} for _ in segments]
    for (segment, offset), each in zip(merged, elements, strict=True):
        parts[segment].setdefault(offset, each)
    pages: list[Pages] = []
    for in_page in parts:
        each, *others = in_page.values()
        if any(other != each for other in others):
            return ()
        if others:
            each = msgspec.structs.replace(each, segments=(1,), shape=(len(in_page), *each.shape))
        pages.append(each)
    return tuple(_counted(each, len([*alike])) for each, alike in itertools.groupby(pages))


def _counted(each: Pages, segments: int) -> Pages:
    """The same in this number of segments, those of one tensor or of several."""
    tensors, rest = divmod(segments, math.prod(each.segments))
    counted = (segments,) if rest else (tensors, *each.segments[1:])
    return msgspec.structs.replace(each, segments=counted)


def _scattered(
    views: Sequence[TensorView], pieces: Sequence[int], found: int, limit: int
) -> DeviceError:
    most = max(range(len(views)), key=pieces.__getitem__)
    return views[most].refuse(
        f"is scattered over {pieces[most]} pieces in every block, all tensors over {found}, of "
        f"at most {limit}"
    )


def _blocks(
    view: TensorView, num_blocks: int, hint: int | None, page_limit: int | None = None
) -> _Blocks:
    if 0 in view.shape:
        raise view.refuse("is empty")
    dim, parts = block_dimension(view, num_blocks, hint)
    stride = view.strides[dim] * parts
    dims = [Dim(*pair) for pair in zip(view.shape, view.strides, strict=True)]
    dims[dim] = Dim(parts, view.strides[dim])
    inside = tuple(each for each in dims if each.size != 1)
    counted = (Dim(num_blocks, stride),) if num_blocks > 1 else ()
    extent = view.itemsize
    for each in sorted(inside + counted, key=lambda each: each.stride):
        if each.stride < extent:
            raise view.refuse("overlaps itself")
        extent += each.stride * (each.size - 1)
    # The page grows outward from one element while it is dense.
    page_bytes, in_page = view.itemsize, set()
    for each in sorted(inside, key=lambda each: each.stride):
        if each.stride != page_bytes or page_bytes == page_limit:
            break
        page_bytes *= each.size
        in_page.add(each)
    if page_limit not in (None, page_bytes):
        raise view.refuse(f"has no pages of {page_limit} bytes")
    return _Blocks(
        view,
        stride if counted else extent,
        page_bytes,
        tuple(each for each in inside if each in in_page),
        tuple(each for each in inside if each not in in_page),
    )


def block_dimension(view: TensorView, num_blocks: int, hint: int | None) -> tuple[int, int]:
    """The dimension that counts blocks, and the number of parts that a kernel cuts each into.

    More than one part needs the engine's block stride as proof: 2 * num_blocks rows may be halves
    of blocks, or all of K before all of V.
    """
    multiples = [
        (dim, size // num_blocks) for dim, size in enumerate(view.shape) if size % num_blocks == 0
    ]
    if hint is None:
        found = [each for each in multiples if each[1] == 1]
        wanted = f"{num_blocks} blocks"
    else:
        fitting = [each for each in multiples if view.strides[each[0]] * each[1] == hint]
        found = [each for each in fitting if each[1] == 1] or fitting
        wanted = f"{num_blocks} blocks that are {hint} bytes apart"
    if not found:
        raise view.refuse(f"has no dimension of {wanted}")
    if len(found) > 1:
        dims = " and ".join(str(dim) for dim, _ in found)
        raise view.refuse(
            f"has more than one dimension ({dims}) that may count {wanted}: "
            "give the engine another number of blocks (--num-gpu-blocks-override)"
        )
    return found[0]


def _segments(blocks: _Blocks) -> list[Segment]:
    """One segment for each index of the outer dimensions, in the tensor's order."""
    view, steps = blocks.view, [range(0, n * stride, stride) for n, stride in blocks.outer]
    return [
        Segment(view.storage, view.offset + sum(at), blocks.page_bytes, blocks.stride)
        for at in itertools.product(*steps)
    ]


def view_tensors(
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[list[TensorView], list[torch.UntypedStorage]]:
    """Each tensor as a `TensorView`, and the distinct storages in order of appearance.

    Raises DeviceError if there are no tensors, if a value is not a dense tensor or has an unknown
    dtype, or if two storages cover the same memory: they cannot be shared.
    """
    if not kv_caches:
        raise DeviceError("the engine registered no KV cache tensors")
    views: list[TensorView] = []
    storages: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "untyped_storage"):
            raise DeviceError(
                f"KV cache {name!r} is a {type(tensor).__name__}, not one tensor: layers of this "
                "kind (Mamba states, for instance) are not supported"
            )
        try:
            dtype = dtype_name(tensor.dtype)
        except FormatError as error:
            raise DeviceError(f"KV cache {name!r}: {error}") from error
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(storages))
        if number == len(storages):
            storages.append(storage)
        views.append(TensorView.of(tensor, name, dtype, number))
    ranges = sorted((storage.data_ptr(), storage.nbytes()) for storage in storages)
    for (address, nbytes), (following, _) in itertools.pairwise(ranges):
        if address + nbytes > following:
            raise DeviceError(
                "two storages of the KV cache cover the same memory: it cannot be shared"
            )
    return views, storages
