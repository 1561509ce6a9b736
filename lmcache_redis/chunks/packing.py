# SPDX-License-Identifier: Apache-2.0
"""Payloads in fewer bytes, bit for bit: floating-point numbers without what their exponents repeat.

The native extension packs and unpacks at about the speed of memory, without the GIL; without it
numpy does the same, and results are equal. What is stored is not trusted: every bound is checked,
and what does not fit together is no payload.

The stored form, little-endian. Elements have 1 (fp8), 2 (bf16, fp16) or 4 bytes (fp32); a reader
knows that, and the length of the payload, beforehand. A tile is 512 elements, a block 32,768 plain
bytes, the last one less. Blocks consist of whole tiles; what is left of the payload is the tail:

    directory: 4 bytes for each block | blocks | tail, as it is

An entry of the directory is the `base` (u8), the `width` (u8) and the number of escapes (u16). With
width 0 the block is as it is, and base and escapes are 0. Else its tiles follow, and then its
escapes, one byte each.

Each element is rotated left by one bit, so that its sign is the lowest bit. Its high byte `h`
becomes a code of `width` bits: `h - base` modulo 256 if that is below `2^width - 1`; else
`2^width - 1`, and the next escape is `h`. `WIDTHS` has the possible ones. A tile is

1. of 2 bytes: the low byte of each element; of 4 bytes: the two low bytes of each, then the third
   of each;
2. the codes, lowest bits first, in planes of 4 bits, 2 and 1: those that add up to the width. A
   plane of `b` bits has `64 * b` bytes; byte `i` has, from its lowest bits on, those of the codes
   `i`, `i + 64 * b`, `i + 2 * 64 * b` and so on.

The sizes of all blocks and the tail add up to what is stored, and each block has as many escape
codes as its entry says; else nothing of it may be used. Which base and width, an encoder decides.

Of 513 bf16 numbers, 1.0 and -2.0 in turns, number 7 zero:

    000: 7f030100                  base, width, escapes
    004: 000100010001000000010001  low bytes: mantissa and sign
    016: 0001 x 250
    516: 0055005500550057          two bits of each code: 0 and 1, of number 7 3
    524: 0055 x 60
    644: 0000000000000001          one bit of each code
    652: 00 x 56
    708: 00                        the escape
    709: 803f                      tail: number 512
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis import native

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The bytes of an element, for each dtype whose numbers are packed. Others have no exponents.
ELEMENT_BYTES: Final = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}

TILE: Final = 512  # elements
BLOCK_BYTES: Final = 32 << 10
# The bits of a code: fp8 e5m2 and e4m3; fp32 and bf16 of narrow and wide ranges; fp16.
WIDTHS: Final = {1: (6, 7), 2: (3, 4, 6), 4: (3, 4)}

_RAW = 0
_PAYLOAD_LINES = 8  # the sample that says whether packing pays
_BLOCK_LINES = 16  # that which decides width and base
_LINE = 32
_LINE_STEP = 40503
_LEAST_SAVED = 32

_Bytes = npt.NDArray[np.uint8]
_Elements = npt.NDArray[Any]


def pack(plain: Buffer, element_bytes: int, into: Buffer) -> int:
    """Pack elements of 1, 2 or 4 bytes. The bytes used of `into`; 0 if it is to be stored plain.

    That is where packing saves less than a 32nd, as a rule seen by a sample at once, or where
    `into` is too small. Then `into` has no defined contents.
    """
    if native.packing is not None:
        return int(native.packing.pack(plain, element_bytes, into))
    return pack_in_numpy(plain, element_bytes, into)


def unpack(stored: Buffer, element_bytes: int, plain: Buffer) -> bool:
    """Bring a payload back. False if `stored` is no packed form of as many bytes as `plain` has.

    Then `plain` has no defined contents.
    """
    if native.packing is not None:
        return bool(native.packing.unpack(stored, element_bytes, plain))
    return unpack_in_numpy(stored, element_bytes, plain)


# --------------------------------------------------------------- reference


class _BlockEntry(NamedTuple):
    """What the directory says of a block. width: the bits of a code, or _RAW."""

    base: int
    width: int
    escapes: int

    def stored_bytes(self, element_bytes: int, block_bytes: int) -> int:
        """0 if there is no such block."""
        if self.width == _RAW:
            return 0 if self.base or self.escapes else block_bytes
        if self.width not in WIDTHS[element_bytes]:
            return 0
        elements = block_bytes // element_bytes
        return elements * (element_bytes - 1) + elements * self.width // 8 + self.escapes


_ENTRY = np.dtype([("base", "u1"), ("width", "u1"), ("escapes", "<u2")])


def pack_in_numpy(plain: Buffer, element_bytes: int, into: Buffer) -> int:
    """As `pack`."""
    data, out = _arrays(plain, element_bytes, into)
    body = _body_bytes(len(data), element_bytes)
    if not body or _choose(data[:body], element_bytes, _PAYLOAD_LINES).width == _RAW:
        return 0
    entries, parts = [], []
    for start, end in _blocks(body):
        entry, packed = _pack_block(data[start:end], element_bytes)
        entries.append(entry)
        parts += packed
    stored = np.concatenate([np.array(entries, _ENTRY).view(np.uint8), *parts, data[body:]])
    if len(stored) > min(_most_stored(len(data)), len(out)):
        return 0
    out[: len(stored)] = stored
    return len(stored)


def unpack_in_numpy(stored: Buffer, element_bytes: int, plain: Buffer) -> bool:
    """As `unpack`."""
    data, out = _arrays(stored, element_bytes, plain)
    body = _body_bytes(len(out), element_bytes)
    blocks = [*_blocks(body)]
    at = len(blocks) * _ENTRY.itemsize
    if len(data) < at:
        return False
    entries = [_BlockEntry(*map(int, each)) for each in data[:at].view(_ENTRY)]
    sizes = [
        entry.stored_bytes(element_bytes, end - start)
        for entry, (start, end) in zip(entries, blocks, strict=True)
    ]
    if 0 in sizes or at + sum(sizes) + len(out) - body != len(data):
        return False
    for entry, size, (start, end) in zip(entries, sizes, blocks, strict=True):
        if not _unpack_block(data[at : at + size], entry, element_bytes, out[start:end]):
            return False
        at += size
    out[body:] = data[at:]
    return True


def _arrays(source: Buffer, element_bytes: int, target: Buffer) -> tuple[_Bytes, _Bytes]:
    if element_bytes not in WIDTHS:
        raise ValueError(f"elements of {element_bytes} bytes: 1, 2 and 4 are possible")
    arrays = (
        np.frombuffer(memoryview(source), np.uint8),
        np.frombuffer(memoryview(target), np.uint8),
    )
    if np.may_share_memory(*arrays):
        raise ValueError("the buffers overlap")
    return arrays


def _body_bytes(nbytes: int, element_bytes: int) -> int:
    return nbytes - nbytes % (TILE * element_bytes)


def _blocks(body: int) -> Iterator[tuple[int, int]]:
    for start in range(0, body, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, body)


def _most_stored(nbytes: int) -> int:
    return nbytes - nbytes // _LEAST_SAVED


def _rotated(data: _Bytes, element_bytes: int, left: int) -> _Elements:
    """Elements, with their bits rotated."""
    elements = data.view(f"<u{element_bytes}")
    right = 8 * element_bytes - left
    return (elements << left | elements >> right).astype(elements.dtype, copy=False)


def _choose(data: _Bytes, element_bytes: int, sampled: int) -> _BlockEntry:
    """The width and the highest base with which the sample is shortest."""
    lines = data.reshape(-1, _LINE * element_bytes)
    numbers = np.arange(sampled) * _LINE_STEP % 65536 * len(lines) >> 16
    sample = _rotated(lines[numbers].reshape(-1), element_bytes, 1) >> 8 * (element_bytes - 1)
    below = np.concatenate(([0], np.bincount(sample, minlength=256).cumsum()))
    rest_bits = 8 * len(sample) * (element_bytes - 1)
    least = _most_stored(8 * len(sample) * element_bytes) - rest_bits
    chosen = _BlockEntry(0, _RAW, 0)
    for width in WIDTHS[element_bytes]:
        window = (1 << width) - 1
        covered = below[window:] - below[:-window]
        most = int(covered.max())
        bits = len(sample) * width + 8 * (len(sample) - most)
        if bits < least:
            least = bits
            chosen = _BlockEntry(int(np.flatnonzero(covered == most)[-1]), width, 0)
    return chosen


def _pack_block(data: _Bytes, element_bytes: int) -> tuple[_BlockEntry, list[_Bytes]]:
    base, width, _ = _choose(data, element_bytes, _BLOCK_LINES)
    if width != _RAW:
        bytes_of = _rotated(data, element_bytes, 1).view(np.uint8).reshape(-1, TILE, element_bytes)
        high, tiles = bytes_of[:, :, -1], len(bytes_of)
        top = (1 << width) - 1
        codes = np.minimum(high - np.uint8(base), np.uint8(top))
        # Of 4 bytes the lower two stay together, the third is apart.
        rest = (slice(0, 2), slice(2, 3)) if element_bytes == 4 else (slice(0, -1),)
        planes = [bytes_of[:, :, each].reshape(tiles, -1) for each in rest]
        planes += _planes_of(codes, width)
        escapes = high[codes == top]
        entry = _BlockEntry(base, width, len(escapes))
        if entry.stored_bytes(element_bytes, len(data)) <= len(data):
            return entry, [np.concatenate(planes, axis=1).reshape(-1), escapes]
    return _BlockEntry(0, _RAW, 0), [data]


def _unpack_block(stored: _Bytes, entry: _BlockEntry, element_bytes: int, out: _Bytes) -> bool:
    base, width, count = entry
    if width == _RAW:
        out[:] = stored
        return True
    tiles = len(out) // (TILE * element_bytes)
    packed = stored[: len(stored) - count].reshape(tiles, -1)
    rest = TILE * (element_bytes - 1)
    codes = _codes_of(packed[:, rest:], width)
    high = codes + np.uint8(base)
    is_escape = codes == (1 << width) - 1
    if int(np.count_nonzero(is_escape)) != count:
        return False
    high[is_escape] = stored[len(stored) - count :]
    bytes_of = np.empty((tiles, TILE, element_bytes), np.uint8)
    bytes_of[:, :, -1] = high
    if element_bytes == 4:
        bytes_of[:, :, :2] = packed[:, : 2 * TILE].reshape(tiles, TILE, 2)
        bytes_of[:, :, 2] = packed[:, 2 * TILE : rest]
    else:
        bytes_of[:, :, :-1] = packed[:, :rest].reshape(tiles, TILE, -1)
    back = 8 * element_bytes - 1
    out[:] = _rotated(bytes_of.reshape(-1), element_bytes, back).view(np.uint8)
    return True


def _plane_bits(width: int) -> Iterator[tuple[int, int]]:
    """The planes of a tile: bits of each code, and where in the code they begin."""
    shift = 0
    for bits in (4, 2, 1):
        if width & bits:
            yield bits, shift
            shift += bits


def _planes_of(codes: _Bytes, width: int) -> list[_Bytes]:
    planes = []
    for bits, shift in _plane_bits(width):
        parts = (codes >> shift & (1 << bits) - 1).reshape(len(codes), 8 // bits, -1)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(parts << shifts, axis=1))
    return planes


def _codes_of(planes: _Bytes, width: int) -> _Bytes:
    codes = np.zeros((len(planes), TILE), np.uint8)
    at = 0
    for bits, shift in _plane_bits(width):
        plane = planes[:, at : at + TILE * bits // 8]
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        parts = plane[:, None, :] >> shifts & (1 << bits) - 1
        codes |= (parts << shift).reshape(codes.shape)
        at += TILE * bits // 8
    return codes
