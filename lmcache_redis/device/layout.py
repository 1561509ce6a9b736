# SPDX-License-Identifier: Apache-2.0
"""Where the pages of a paged KV cache are: segments, and the layout that identifies their bytes.

A worker sends its layout once, at registration. The agent checks it before it computes an address
from it. Does not import torch.

Two engines may exchange chunks if and only if their layouts have the same fingerprint. It covers
what decides the bytes of a chunk (identity, dtype, block and chunk size, page sizes, the order of
elements in a page). It does not cover where pages are (offsets, strides, number of blocks), which
differs between equal engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, NamedTuple

import msgspec

from lmcache_redis.chunks.metadata import MAX_DIMS, MemoryFormat, RemoteMetadata, itemsize
from lmcache_redis.chunks.names import Reach, opaque_pages
from lmcache_redis.errors import ConfigError, DeviceError, FormatError

MAX_SEGMENTS = 65_536
_MAX_ADDRESS = 2**63 - 1


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equally sized pages, one per block: block ``b`` is at ``offset + b * block_stride``.

    All in bytes; ``storage`` is an index of the registered storages. ``block_stride`` may exceed
    ``page_bytes``: padding or another segment is between two pages.
    """

    storage: int
    offset: int
    page_bytes: int
    block_stride: int


class Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The elements in the pages of consecutive segments, which are alike.

    segments: how many tensors, then the dimensions that divide a tensor into several segments (K
        and V, if they are not inside a block). Their product is the number of segments.
    shape: sizes in the order of memory: parts that follow each other in a page, if it has several;
        then the tensor's dimensions within a block.
    """

    segments: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMS)]
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMS)]


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the bytes of one group's parts, and where their pages are.

    A part holds the last `blocks_per_part` blocks of its chunk: usually all of them.

    Attributes:
        identity: names and values of everything else that changes the bytes (model, ranks, ...).
        dtype: torch-free name of the elements' type.
        device: ``"cpu"`` or ``"cuda"``; not part of the fingerprint.
        segments: in the order of a part: all its pages of segment 0, then all of segment 1, ...
        page_format: digest of the order of elements in the pages, from `find_segments`. It
            distinguishes head-major from token-major pages, which have equal sizes.
        reach: which parts of a prefix the engine needs.
        pages: what the pages of all segments hold; empty if it cannot be told.
        shares: how many shares the segments are of, one after the other, if they are cut by head
            (`device.shares`): 1 or more. The segments of each have the same page sizes, and
            ``page_format`` and ``pages`` are of one. 0: they are not cut.
    """

    identity: tuple[tuple[str, str], ...]
    dtype: str
    device: str
    block_size_tokens: int
    num_blocks: int
    segments: tuple[Segment, ...]
    page_format: str = ""
    reach: Reach = Reach()
    pages: tuple[Pages, ...] = ()
    shares: int = 0

    @property
    def share(self) -> KVLayout:
        """The layout of the first share alone."""
        segments = self.segments[: len(self.segments) // max(1, self.shares)]
        return msgspec.structs.replace(self, segments=segments, shares=min(1, self.shares))

    @property
    def pages_of_all(self) -> tuple[Pages, ...]:
        """`pages`, for each share."""
        return self.pages * max(1, self.shares)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: its pages in every segment."""
        return sum(segment.page_bytes for segment in self.segments)

    def blocks_per_part(self, chunk_size_tokens: int) -> int:
        """Blocks in a chunk's part. Raises ConfigError unless whole blocks make up a chunk."""
        blocks, rest = divmod(chunk_size_tokens, self.block_size_tokens)
        if blocks <= 0 or rest:
            raise ConfigError(
                f"a chunk of {chunk_size_tokens} tokens is not a multiple of the engine's blocks "
                f"of {self.block_size_tokens} tokens"
            )
        return self.reach.blocks_per_part(blocks, self.block_size_tokens)

    def metadata(self, chunk_size_tokens: int) -> RemoteMetadata:
        """What a part holds: for each of `pages` its segments, blocks and shape; else bytes.

        Raises ConfigError as `blocks_per_part` does, FormatError for a part that has no encoding.
        """
        blocks = self.blocks_per_part(chunk_size_tokens)
        part_bytes = blocks * self.block_bytes
        if pages := self.pages_of_all:
            shapes = [(*each.segments, blocks, *each.shape) for each in pages]
            dtypes = [each.dtype for each in pages]
            with contextlib.suppress(FormatError):  # too many kinds of pages, or dimensions
                return RemoteMetadata(part_bytes, shapes, dtypes, MemoryFormat.PAGES)
        return opaque_pages(part_bytes)

    def fingerprint(self, chunk_size_tokens: int) -> bytes:
        """32 bytes that are equal exactly if parts may be exchanged: blake2b of `canonical`."""
        return fingerprint_of(self.canonical(chunk_size_tokens))

    def canonical(self, chunk_size_tokens: int) -> bytes:
        """What decides the bytes of parts, or of one share of each.

        The compact ASCII JSON array ``[identity sorted, dtype, block size, chunk size, page format,
        page bytes of every segment]``, followed by ``kind of reach, blocks per part`` unless the
        kind is "all".
        """
        decisive: list[object] = [
            sorted(self.identity),
            self.dtype,
            self.block_size_tokens,
            chunk_size_tokens,
            self.page_format,
            [segment.page_bytes for segment in self.share.segments],
        ]
        if self.reach.kind != "all":
            decisive += [self.reach.kind, self.blocks_per_part(chunk_size_tokens)]
        return json.dumps(decisive, separators=(",", ":")).encode("ascii")

    def check(self, storage_sizes: Sequence[int]) -> None:
        """Raise DeviceError unless every page of every block lies inside its storage.

        storage_sizes: bytes of each storage, as the side that addresses them found.
        """
        if self.device not in ("cpu", "cuda"):
            raise DeviceError(f"unknown device {self.device!r} in a layout")
        if self.num_blocks <= 0 or not 0 < self.block_size_tokens < 2**31:
            raise DeviceError(
                f"a layout cannot have {self.num_blocks} blocks of {self.block_size_tokens} tokens"
            )
        if len({name for name, _ in self.identity}) != len(self.identity):
            raise DeviceError("a layout names a part of its identity twice")
        if not 0 < len(self.segments) <= MAX_SEGMENTS:
            raise DeviceError(
                f"a layout has {len(self.segments)} segments, 1 to {MAX_SEGMENTS} are allowed"
            )
        for index, segment in enumerate(self.segments):
            reason = _fault(segment, self.num_blocks, storage_sizes)
            if reason:
                raise DeviceError(f"segment {index} ({segment}) {reason}")
        self._check_shares()
        self._check_pages()

    def _check_shares(self) -> None:
        sizes, shares = [segment.page_bytes for segment in self.segments], max(1, self.shares)
        if self.shares < 0 or sizes[: len(sizes) // shares] * shares != sizes:
            raise DeviceError(f"the layout's {len(sizes)} segments are not of {self.shares} shares")

    def _check_pages(self) -> None:
        described: list[int] = []
        for each in self.pages_of_all:
            try:
                page_bytes = math.prod(each.shape) * itemsize(each.dtype)
            except FormatError as error:
                raise DeviceError(f"the layout's pages hold no elements: {error}") from error
            count, left = math.prod(each.segments), len(self.segments) - len(described)
            if not 0 < count <= left:
                raise DeviceError(f"the layout's pages fill {count} segments where {left} are left")
            described += [page_bytes] * count
        if self.pages and described != [segment.page_bytes for segment in self.segments]:
            raise DeviceError("the layout's pages do not match its segments")


def fingerprint_of(canonical: bytes) -> bytes:
    """The fingerprint of a layout with this `KVLayout.canonical`."""
    return hashlib.blake2b(canonical, digest_size=32, person=b"lmcr-layout-1").digest()


def named_pairs(canonical: bytes) -> dict[str, str]:
    """What decides the bytes of parts, as names and values for people.

    canonical: of any layout. Raises FormatError if it is not `KVLayout.canonical`, or
    holds what a terminal would not print.
    """
    try:
        identity, dtype, block, chunk, page_format, page_bytes, *reach = json.loads(canonical)
        sizes = [f"{len([*alike])} of {size} bytes" for size, alike in groupby(page_bytes)]
        pairs = dict(identity) | {
            "dtype": dtype,
            "block_size_tokens": str(block),
            "chunk_size_tokens": str(chunk),
            "page_format": page_format,
            "pages": ", ".join(sizes),
        }
        if reach:
            pairs |= {"reach": reach[0], "blocks_per_part": str(reach[1])}
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise FormatError(f"not the description of a layout: {error}") from error
    if not all(
        isinstance(text, str) and text.isprintable() for each in pairs.items() for text in each
    ):
        raise FormatError("the description of a layout holds what cannot be printed")
    return pairs


def _fault(segment: Segment, num_blocks: int, storage_sizes: Sequence[int]) -> str | None:
    if not 0 <= segment.storage < len(storage_sizes):
        return f"is in storage {segment.storage} of {len(storage_sizes)}"
    if segment.page_bytes <= 0:
        return "has empty pages"
    if segment.offset < 0:
        return "begins before its storage"
    if segment.block_stride < segment.page_bytes:
        return "has blocks that overlap"
    end = segment.offset + (num_blocks - 1) * segment.block_stride + segment.page_bytes
    if end > min(storage_sizes[segment.storage], _MAX_ADDRESS):
        return f"ends at byte {end} of a storage of {storage_sizes[segment.storage]}"
    return None


class MergedAt(NamedTuple):
    """Where a segment's pages are after merging: from ``offset`` on in those of ``segment``."""

    segment: int
    offset: int


def coalesce(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], tuple[MergedAt, ...]]:
    """Merge segments that are adjacent in every block into one with a larger page.

    Fewer, larger copies then move the same bytes: layouts that pack all layers of a block together
    become a single segment. A merged segment takes the position of its first part; otherwise the
    order is kept. Exact duplicates (layers that share one KV cache) are copied once. Segments that
    overlap in another way are not merged.

    Returns the merged segments, and for each given segment where its pages are now.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for position, segment in enumerate(segments):
        groups.setdefault((segment.storage, segment.block_stride), []).append(position)
    merged: list[tuple[Segment, list[int]]] = []
    for positions in groups.values():
        # Stable: of equal segments the earliest comes first.
        positions.sort(key=lambda at: (segments[at].offset, segments[at].page_bytes))
        current, parts = segments[positions[0]], [positions[0]]
        for position in positions[1:]:
            segment = segments[position]
            page_bytes = current.page_bytes + segment.page_bytes
            touches = segment.offset == current.offset + current.page_bytes
            if segment == segments[parts[-1]]:
                parts.append(position)
            elif touches and page_bytes <= current.block_stride:
                current = msgspec.structs.replace(current, page_bytes=page_bytes)
                parts.append(position)
            else:
                merged.append((current, parts))
                current, parts = segment, [position]
        merged.append((current, parts))
    merged.sort(key=lambda item: min(item[1]))
    found = {
        position: MergedAt(index, segments[position].offset - whole.offset)
        for index, (whole, parts) in enumerate(merged)
        for position in parts
    }
    return tuple(whole for whole, _ in merged), tuple(found[i] for i in range(len(segments)))


def distinct(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], tuple[MergedAt, ...]]:
    """As `coalesce`, and merges nothing but exact duplicates."""
    places = {segment: number for number, segment in enumerate(dict.fromkeys(segments))}
    return tuple(places), tuple(MergedAt(places[segment], 0) for segment in segments)
