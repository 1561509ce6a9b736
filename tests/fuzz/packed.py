# SPDX-License-Identifier: Apache-2.0
"""The target `packed`: damaged payloads in their packed form, in C and in numpy.

An input is the bytes of an element (1 byte), the length of the payload (4 bytes), and what is
stored. Both implementations must say the same of it, and write nothing around their buffers.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmcache_redis.chunks import packing
from tests.fuzz.mutation import Mutator
from tests.fuzz.target import ACCEPTED, Target

_HEAD = struct.Struct("<BI")
_MOST_BYTES = 1 << 17
_GUARD = b"\x5a" * 64
_TOKENS = (
    *(b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff", b"\x78\x03\x10\x00", b"\x78\x04\x00\x00"),
    *(bytes(64), b"\xff" * 64, bytes(packing.TILE), b"\x55" * 128),
)


class Form(NamedTuple):
    """A payload, and what it is packed to: `width` is that of its first block."""

    element_bytes: int
    width: int
    plain: bytes
    stored: bytes

    def as_input(self) -> bytes:
        return _HEAD.pack(self.element_bytes, len(self.plain)) + self.stored


def elements_with(highs: list[int], element_bytes: int) -> bytes:
    """Elements with these high bytes, and noise in all else."""
    rotated = np.zeros((len(highs), element_bytes), np.uint8)
    low = random.Random(element_bytes).randbytes(len(highs) * (element_bytes - 1))
    rotated[:, :-1] = np.frombuffer(low, np.uint8).reshape(len(highs), -1)
    rotated[:, -1] = highs
    numbers = rotated.reshape(-1).view(f"<u{element_bytes}")
    top = numbers.dtype.type(8 * element_bytes - 1)
    return bytes(numbers >> numbers.dtype.type(1) | (numbers & numbers.dtype.type(1)) << top)


def _form(element_bytes: int, plain: bytes) -> Form:
    out = bytearray(len(plain))
    used = packing.pack_in_numpy(plain, element_bytes, out)
    assert used, "packing pays"
    return Form(element_bytes, out[1], plain, bytes(out[:used]))


def _forms() -> Iterator[Form]:
    """One with every width, of two tiles and a tail; and one of three blocks, the second raw."""
    for element_bytes, widths in packing.WIDTHS.items():
        for width in widths:
            highs = random.Random(width).choices(range(100, 99 + (1 << width)), k=2 * packing.TILE)
            highs[7::100] = [5] * len(highs[7::100])
            yield _form(element_bytes, elements_with(highs, element_bytes) + b"tail")
    count = packing.BLOCK_BYTES // 2
    near, any_ = range(100, 107), range(256)
    highs = random.Random(1).choices(near, k=count) + random.Random(2).choices(any_, k=count)
    yield _form(2, elements_with(highs + random.Random(3).choices(near, k=packing.TILE), 2))


FORMS = (*_forms(),)


def _run(data: bytes, mutator: Mutator) -> str:
    if len(data) < _HEAD.size:
        return "too short"
    element_bytes, nbytes = _HEAD.unpack_from(data)
    stored, nbytes = data[_HEAD.size :], nbytes % _MOST_BYTES
    outs = [bytearray(_GUARD + bytes(nbytes) + _GUARD) for _ in range(2)]
    places = [memoryview(out)[len(_GUARD) : len(_GUARD) + nbytes] for out in outs]
    try:
        is_good = packing.unpack_in_numpy(stored, element_bytes, places[0])
    except ValueError:
        assert element_bytes not in packing.WIDTHS
        return "ValueError"
    assert packing.unpack(stored, element_bytes, places[1]) == is_good
    for out in outs:
        assert out.startswith(_GUARD)
        assert out.endswith(_GUARD)
    if not is_good:
        return "refused"
    assert places[0] == places[1]
    # What came out is packed again, if it pays, and comes back.
    again = bytearray(nbytes)
    used = packing.pack(places[0], element_bytes, again)
    if used:
        assert packing.unpack(memoryview(again)[:used], element_bytes, places[1])
        assert places[0] == places[1]
    return ACCEPTED


PACKED = Target("packed", tuple(form.as_input() for form in FORMS), _TOKENS, Mutator.next, _run)
