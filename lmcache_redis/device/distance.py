# SPDX-License-Identifier: Apache-2.0
"""How far two copies of a part are from each other, whatever batch computed them.

The same tokens computed twice do not give the same bits: the shape of a batch decides in which
order sums are rounded. So parts are compared as numbers, page by page. The distance of two pages is

    median of |a - b|  /  the larger median of |a| and |b|

about 1.4 for numbers that have nothing to do with each other. The median ignores what rounding may
change much: a few tokens whose router took another expert, and the few channels whose values are a
hundred times as large as the others and would hide all of them. Where half of the numbers are zero,
means take the place of medians. The distance of two parts is that of their farthest pages.
tests/integrations/distances.py has what was measured: parts that are `far_apart` are of other KV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_redis.chunks.metadata import itemsize
from lmcache_redis.device.layout import KVLayout

# Between what rounding does and what other KV is, see tests/integrations/distances.py. States sum
# over all tokens before them, and amplify rounding.
FAR = 0.15
FAR_STATES = 0.4
# Of each page, evenly spread: more do not change a median much.
_SAMPLES = 2048
_FLOATS = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
# How vLLM names the elements of pages that it declares as bytes.
_FP8_IN_BYTES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.float32]


class Distance(NamedTuple):
    """The distance of two parts, and the segment and the block (of the part) of their farthest
    pages."""

    far: float
    segment: int
    block: int


def far_apart(layout: KVLayout) -> float:
    """Parts of a layout that are farther from each other are of other KV."""
    return FAR_STATES if layout.reach.kind == "state" else FAR


def part_distance(
    layout: KVLayout, blocks: int, one: Sequence[memoryview], other: Sequence[memoryview]
) -> Distance | None:
    """The distance of two parts of ``blocks`` blocks, each given as its stripes.

    None if none of its pages hold numbers: packed bytes cannot be compared.
    """
    farthest: Distance | None = None
    first, at = 0, 0
    for pages in layout.pages_of_all:
        dtype = _numeric(layout, pages.dtype)
        elements = math.prod(pages.shape)
        run_bytes = blocks * elements * itemsize(pages.dtype)
        for segment in range(first, first + math.prod(pages.segments)):
            if dtype is not None:
                a, b = (
                    _sampled(_read(part, at, run_bytes), blocks, itemsize(pages.dtype))
                    for part in (one, other)
                )
                found = page_distances(numbers(a, dtype), numbers(b, dtype))
                block = int(found.argmax())
                if farthest is None or found[block] > farthest.far:
                    farthest = Distance(float(found[block]), segment, block)
            at += run_bytes
        first += math.prod(pages.segments)
    return farthest


def page_distances(a: _Numbers, b: _Numbers) -> npt.NDArray[np.float64]:
    """The distance of each page (row) of ``a`` from that of ``b``, 0 or more.

    What is infinite or no number in both pages is equal, in one of them infinitely far.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(a - b)
        apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
        apart[np.isnan(apart)] = np.inf
        sizes = [np.where(np.isfinite(each), np.abs(each), 0.0) for each in (a, b)]
        size = np.maximum(*(np.median(each, axis=1) for each in sizes))
        means = np.maximum(*(each.mean(axis=1) for each in sizes))
        found = np.where(size > 0, np.median(apart, axis=1) / size, apart.mean(axis=1) / means)
    found[np.isnan(found)] = 0.0  # nothing but zeros in both
    return found.astype(np.float64)


def numbers(raw: _Bytes, dtype: str) -> _Numbers:
    """The numbers in bytes, along the last dimension; ``dtype`` is one of `_numeric`."""
    if dtype in _FLOATS:
        return raw.view(_FLOATS[dtype]).astype(np.float32)
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _FP8[dtype][raw]


def _numeric(layout: KVLayout, dtype: str) -> str | None:
    """What the elements are; None if they are no numbers."""
    if dtype == "uint8":
        dtype = _FP8_IN_BYTES.get(dict(layout.identity).get("kv_cache_dtype", ""), dtype)
    return dtype if dtype in _FLOATS or dtype in _FP8 or dtype == "bfloat16" else None


def _read(stripes: Sequence[memoryview], at: int, nbytes: int) -> _Bytes:
    """Bytes of a part; a copy only where they are in several stripes."""
    found: list[_Bytes] = []
    for stripe in stripes:
        if at < len(stripe) and nbytes > 0:
            piece = np.frombuffer(stripe[at : at + nbytes], np.uint8)
            found.append(piece)
            nbytes -= len(piece)
        at = max(0, at - len(stripe))
    return found[0] if len(found) == 1 else np.concatenate(found)


def _sampled(raw: _Bytes, pages: int, item_bytes: int) -> _Bytes:
    """The bytes of some elements of each page, one page a row."""
    elements = raw.reshape(pages, -1, item_bytes)
    # Odd, so that all remainders are among them, whatever the sizes of heads.
    step = elements.shape[1] // _SAMPLES | 1
    return np.ascontiguousarray(elements[:, ::step]).reshape(pages, -1)


def _fp8_table(exponent_bits: int, has_infinities: bool) -> _Numbers:
    """The value of each byte of an OCP 8-bit float (Open Compute Project, OFP8, 2023)."""
    mantissa_bits, top = 7 - exponent_bits, (1 << exponent_bits) - 1
    byte = np.arange(256)
    exponent = byte >> mantissa_bits & top
    mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    # The smallest exponent is of numbers without a leading 1.
    table = (mantissa + (exponent > 0)) * 2.0 ** (np.maximum(exponent, 1) - (top >> 1))
    if has_infinities:
        table[exponent == top] = np.where(mantissa[exponent == top], math.nan, math.inf)
    else:
        table[byte & 0x7F == 0x7F] = math.nan
    return np.where(byte & 0x80, -table, table).astype(np.float32)


_FP8 = {"float8_e4m3fn": _fp8_table(4, False), "float8_e5m2": _fp8_table(5, True)}
