"""How the elements of a chunk are arranged, by the numbers that stand for it."""

from __future__ import annotations

import enum


class MemoryFormat(enum.Enum):
    """How a chunk's elements are arranged. Values below 16 are those of LMCache."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, layers, tokens, hidden]
    KV_BLOB = 1
    KV_T2D = 2  # [tokens, 2, hidden]
    KV_2TD = 3  # [2, tokens, hidden]
    BINARY = 4  # encoded bytes; the shape is that of what they decode to
    BINARY_BUFFER = 5  # as BINARY
    KV_MLA_FMT = 6  # [1, layers, tokens, head size]
    EC_TD = 7  # [tokens, hidden] of an encoder cache
    HS_TD = 8  # [tokens, hidden] of hidden states
    PAGES = 0x4C52  # opaque pages, segment-major: each segment's pages in token order
