# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from lmcache_redis.chunks.metadata import (
    DTYPE_NAMES,
    MemoryFormat,
    RemoteMetadata,
    dtype_from_code,
    dtype_name,
    itemsize,
    torch_dtype,
)
from lmcache_redis.errors import FormatError

# Written out: a code that changes would misread what is already stored.
CODES_AND_ITEMSIZES = {
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


def dtype_code(name: str) -> int:
    """As it is encoded, behind 16 bytes."""
    encoded = RemoteMetadata(0, [()], [name], MemoryFormat.UNDEFINED).serialize()
    return int.from_bytes(encoded[16:20], "little")


def test_codes_and_sizes_are_the_documented_ones() -> None:
    assert set(DTYPE_NAMES) == set(CODES_AND_ITEMSIZES)
    for name, (code, size) in CODES_AND_ITEMSIZES.items():
        assert dtype_code(name) == code
        assert itemsize(name) == size
        assert dtype_from_code(code) == name


def test_code_1_is_read_as_float16_and_never_written() -> None:
    assert dtype_from_code(1) == "float16"
    assert 1 not in {dtype_code(name) for name in DTYPE_NAMES}


@pytest.mark.parametrize("code", [-1, 0, 9, 63, 75, 2**32 - 1])
def test_an_unknown_code_is_refused(code: int) -> None:
    with pytest.raises(FormatError, match=f"unknown dtype code {code}"):
        dtype_from_code(code)


@pytest.mark.parametrize("name", ["", "half", "float4", "torch.", "torch.nn", "cuda.float16"])
def test_an_unknown_name_is_refused(name: str) -> None:
    for function in (dtype_name, itemsize):
        with pytest.raises(FormatError, match="unknown dtype"):
            function(name)


@pytest.mark.parametrize("value", [None, 2, b"float16", object()])
def test_what_is_no_dtype_is_refused(value: str) -> None:
    with pytest.raises(FormatError, match=r"a dtype is a torch\.dtype or its name"):
        dtype_name(value)


def test_a_name_may_carry_the_module() -> None:
    assert dtype_name("torch.bfloat16") == "bfloat16"


def test_torch_dtypes_round_trip_and_agree_on_sizes() -> None:
    torch = pytest.importorskip("torch")
    for name in DTYPE_NAMES:
        if not hasattr(torch, name):
            continue
        dtype = torch_dtype(name)
        assert dtype is getattr(torch, name)
        assert dtype_name(dtype) == name
        assert torch_dtype(dtype) is dtype
        assert itemsize(dtype) == dtype.itemsize
    assert dtype_name(torch.half) == "float16"
    with pytest.raises(FormatError, match="unknown dtype 'complex64'"):
        dtype_name(torch.complex64)


def test_a_dtype_that_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(FormatError, match="has no dtype 'float8_e5m2'"):
        torch_dtype("float8_e5m2")
