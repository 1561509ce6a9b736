# SPDX-License-Identifier: Apache-2.0
"""Copies between an engine's blocks in CPU memory and slots. Implemented in `copies.c`, used by
`lmcache_redis.device.cpu`.
"""

from typing_extensions import Buffer

def copy(to: Buffer, source: Buffer, nbytes: Buffer, most: int, until_ns: int, /) -> int:
    """Copy between addresses, in order and without the GIL; return how many bytes were copied.

    to, source, nbytes: columns of int64, equally long. The caller answers for all addresses. After
    ``until_ns`` (``time.monotonic_ns()``), which is looked at before every ``most`` bytes, nothing
    is copied. ValueError: they are no such columns.
    """
