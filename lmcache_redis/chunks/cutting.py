# SPDX-License-Identifier: Apache-2.0
"""Into how large stripes chunks are cut: those that take the least memory of a server."""

from __future__ import annotations

from lmcache_redis.chunks.frame import HEADER_BYTES, pieces

_ALIGN_BYTES = 64
# What a server adds to a string of many bytes.
_STRING_BYTES = 10


def stripe_payload_bytes(chunk_bytes: int, slot_bytes: int) -> int:
    """Payload bytes of each stripe but the last, at most slot_bytes.

    The fewest stripes that fit the slots, in the size that takes the least memory of a server. With
    equal sizes it could be a quarter more. The last has a quarter of the others at least: movers
    are slower where large and small stripes take turns. Multiples of 64 bytes, unless a slot is
    none. Raises FormatError unless both sizes are positive.
    """
    count = pieces(chunk_bytes, slot_bytes)
    most = min(slot_bytes, 4 * chunk_bytes // (4 * count - 3))
    equal = size = min(-(-chunk_bytes // (count * _ALIGN_BYTES)) * _ALIGN_BYTES, slot_bytes)
    sizes = [equal, max(equal, most // _ALIGN_BYTES * _ALIGN_BYTES)]
    while (size := _filled(size + _ALIGN_BYTES)) <= most:
        sizes.append(size)

    def memory_bytes(size: int) -> int:
        last = chunk_bytes - (count - 1) * size
        return (count - 1) * _taken_bytes(size) + _taken_bytes(last)

    return min(sizes, key=memory_bytes)


def _taken_bytes(payload_bytes: int) -> int:
    return allocated_bytes(HEADER_BYTES + payload_bytes + _STRING_BYTES)


def _filled(payload_bytes: int) -> int:
    """The largest payload that takes no more memory."""
    room = _taken_bytes(payload_bytes) - HEADER_BYTES - _STRING_BYTES
    return room // _ALIGN_BYTES * _ALIGN_BYTES


def allocated_bytes(size_bytes: int) -> int:
    """What jemalloc, the allocator of Redis and Valkey, takes for a string of this size.

    https://jemalloc.net/jemalloc.3.html#size_classes
    """
    # From 128 bytes on there are four classes for each power of two.
    spacing = 16 if size_bytes <= 128 else 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // spacing) * spacing
