"""Element types and memory formats by name, with their codes in encoded metadata. Free of torch.

A dtype is named as in torch, without the module, for instance ``"bfloat16"``. Only `torch_dtype`
imports torch, and only when called. The meaning of a code never changes, because stored values
contain codes. Dtype codes below 64 and formats below 16 are those of LMCache.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from lmcache_redis.errors import FormatError

if TYPE_CHECKING:
    import torch


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
NAME_OF_CODE: dict[int, str] = {
    1: "float16",  # torch.half in LMCache: read, never written
    **{code: name for name, (code, _) in _CODE_AND_ITEMSIZE.items()},
}

DTYPE_NAMES: tuple[str, ...] = tuple(_CODE_AND_ITEMSIZE)


def dtype_name(dtype: torch.dtype | str) -> str:
    """The torch-free name of a dtype, from a ``torch.dtype``, ``"float16"`` or ``"torch.float16"``.

    Raises FormatError for anything that has no code.
    """
    kind = type(dtype)
    if not isinstance(dtype, str) and (kind.__module__, kind.__name__) != ("torch", "dtype"):
        raise FormatError(f"a dtype is a torch.dtype or its name, not {kind.__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in _CODE_AND_ITEMSIZE:
        raise FormatError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_NAMES)}")
    return name


def dtype_code(name: torch.dtype | str) -> int:
    """The code of a dtype in encoded metadata. Raises FormatError if it has none."""
    return _CODE_AND_ITEMSIZE[dtype_name(name)][0]


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
    """The ``torch.dtype`` of a name; imports torch.

    Raises FormatError for a dtype that is unknown, here or to the installed torch.
    """
    import torch

    known = dtype_name(name)
    found = getattr(torch, known, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {known!r}")
    return found
