# SPDX-License-Identifier: Apache-2.0
"""Payloads in fewer bytes, bit for bit: `lmcache_redis.chunks.packing` documents and uses it.

Elements have 1, 2 or 4 bytes. The buffers must not overlap: that is a ValueError.
"""

from typing_extensions import Buffer

def pack(plain: Buffer, element_bytes: int, into: Buffer, /) -> int: ...
def unpack(stored: Buffer, element_bytes: int, plain: Buffer, /) -> bool: ...
def use_vectors(name: str, /) -> bool: ...
