# SPDX-License-Identifier: Apache-2.0
"""A chunk in shares: each has some of the model's KV heads, at any size of tensor parallelism.

A rank of any size holds whole shares. They are one part of a chunk to it and to the host pool. In
tiers each is a chunk of its own, with a kv_rank and a layout that are the same whichever rank holds
the share:

    a model of 8 heads in 8 shares    TP 1: shares 0 to 7    TP 2: 0 to 3 and 4 to 7    TP 8: one

Nothing is reordered: a share is those segments of a cache that hold its heads. A page has all heads
of the share. So pages must be head-major: in a block, the numbers of a head follow each other (or
those of its K, and those of its V). Pages that touch are not merged: whether they do depends on the
other heads that a rank has, and what is merged decides the order of bytes. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lmcache_redis.device.blocks import PagedSegments, TensorView, block_dimension, find_segments
from lmcache_redis.device.layout import MAX_SEGMENTS
from lmcache_redis.errors import ConfigError, DeviceError

_DEFAULT_SHARES = 8
_MOST_RUNS = 2  # of a head in a kernel's block: K and V


class Share(NamedTuple):
    """Share ``number`` of a model's KV: ``heads`` heads, from this rank's head ``first`` on."""

    number: int
    first: int
    heads: int


@dataclass(frozen=True)
class HeadShares:
    """How a rank's KV is cut.

    dims: by the name of each tensor, its dimension that counts heads. shares: those of this rank,
    consecutive, of ``count`` in all.
    """

    dims: Mapping[str, int]
    shares: Sequence[Share]
    count: int


def default_shares(heads: int) -> int:
    """8, or the largest power of two below that divides the heads: the same at every TP size."""
    return math.gcd(heads, _DEFAULT_SHARES)


def shares_of_rank(heads: int, shares: int, rank: int, ranks: int) -> list[Share]:
    """What one of ``ranks`` tensor-parallel ranks holds of a model with ``heads`` KV heads.

    With fewer heads than ranks, each head is on several consecutive ranks. Raises ConfigError
    unless shares have equally many heads, and every rank whole shares.
    """
    if shares < 1 or heads % shares:
        raise ConfigError(f"kv_shares is {shares}: it must divide the model's {heads} KV heads")
    if heads % ranks and ranks % heads:
        raise ConfigError(f"{heads} KV heads cannot be divided between {ranks} ranks")
    per_share, local = heads // shares, max(1, heads // ranks)
    if local % per_share:
        raise ConfigError(
            f"kv_shares is {shares}, and each of {ranks} ranks has {local} of {heads} KV heads: "
            f"give all engines a multiple of {heads // local}, so that ranks have whole shares"
        )
    first = rank * heads // ranks
    return [Share((first + at) // per_share, at, per_share) for at in range(0, local, per_share)]


def find_shares(
    views: Sequence[TensorView],
    num_blocks: int,
    heads: HeadShares,
    block_strides: Mapping[str, int] | None = None,
) -> PagedSegments:
    """The segments of all shares of a rank, one share after the other; format and pages are of one.

    Raises DeviceError, as `find_share` does.
    """
    found = [
        find_share(views, num_blocks, heads.dims, share, block_strides) for share in heads.shares
    ]
    segments = [segment for each in found for segment in each.segments]
    if len(segments) > MAX_SEGMENTS:
        raise DeviceError(f"shares of {len(segments)} segments; at most {MAX_SEGMENTS} are allowed")
    return found[0]._replace(segments=tuple(segments))


def find_share(
    views: Sequence[TensorView],
    num_blocks: int,
    dims: Mapping[str, int],
    share: Share,
    block_strides: Mapping[str, int] | None = None,
) -> PagedSegments:
    """The segments of a share's heads, which have the same page format on every rank.

    dims: as in `HeadShares`; the rest as in `find_segments`. Raises DeviceError, as that does, and
    for pages that are not head-major.
    """
    hints = block_strides or {}
    narrow, page_bytes = [], {}
    for view in views:
        dim = dims[view.name]
        heads, stride = view.shape[dim], view.strides[dim]
        blocks, parts = block_dimension(view, num_blocks, hints.get(view.name))
        if dim == blocks or not 0 <= share.first <= heads - share.heads:
            raise view.refuse(f"has no heads {share.first} to {share.first + share.heads - 1}")
        head_bytes = math.prod(view.shape) // heads // num_blocks * view.itemsize
        if not stride <= head_bytes <= _MOST_RUNS * parts * stride:
            raise view.refuse(
                "is not head-major: the tokens of a head do not follow each other, as they do with "
                "kv_cache_layout BLHNC"
            )
        page_bytes[view.name] = share.heads * stride
        shape = (*view.shape[:dim], share.heads, *view.shape[dim + 1 :])
        narrow.append(replace(view, shape=shape, offset=view.offset + share.first * stride))
    return find_segments(narrow, num_blocks, block_strides, page_bytes)
