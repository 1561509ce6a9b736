# SPDX-License-Identifier: Apache-2.0
"""The copy kernels as PTX, which the driver of a GPU compiles: a file and an entry for each name.

``gather_16.ptx`` copies pages to staging by accesses of 16 bytes, ``scatter_1.ptx`` staging to
pages byte by byte, and so on (`NAMES`). They are made when the package is built (`compile`, from
`source`, by Triton); nothing of Triton is needed to run them. They take every GPU from sm_80 and
every driver from 525 on.

A launch has ``(tiles, chunks)`` programs of `THREADS` threads, and five 64-bit parameters:

    rows                    of `lmcache_redis.device.table.Launch`, on the GPU
    block_ids               [chunks, n_blocks] of int64, on the GPU; a negative id is skipped
    staging                 on the GPU, aligned to 16
    n_blocks                of a chunk
    staging_stride_bytes    from chunk to chunk in staging

A kernel checks nothing.
"""

from __future__ import annotations

from pathlib import Path

from lmcache_redis.errors import DeviceError

WIDTHS = (16, 8, 4, 2, 1)
THREADS = 128


def name_of(width: int, *, scatter: bool) -> str:
    """The name of a kernel: of its file, and of the entry in it."""
    return f"{'scatter' if scatter else 'gather'}_{width}"


NAMES = tuple(name_of(width, scatter=scatter) for scatter in (False, True) for width in WIDTHS)


def text(name: str) -> bytes:
    """The PTX of a kernel. Raises DeviceError if the package was built without it."""
    try:
        return Path(__file__).with_name(f"{name}.ptx").read_bytes()
    except OSError as error:
        raise DeviceError(
            f"KV caches on GPUs need the kernel {name}, which this installation lacks ({error}): "
            "reinstall lmcache-redis from a wheel, or build it where Triton can be installed"
        ) from error
