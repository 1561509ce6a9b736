# SPDX-License-Identifier: Apache-2.0
"""Advice to the kernel changes no contents and reports refusal as a bool."""

from __future__ import annotations

import ctypes
import mmap

from lmcache_redis.native.madvise import (
    PAGE_SIZE_BYTES,
    address_of,
    ask_for_huge_pages,
    fault_in,
)

SIZE = 8 << 20


def test_faulting_in_keeps_contents_and_takes_the_memory() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[SIZE - 1] = 7
        before = resident_bytes(address_of(memory))
        assert fault_in(address_of(memory), SIZE, for_write=True)
        assert before < SIZE == resident_bytes(address_of(memory))
        assert memory[SIZE - 1] == 7
        assert memory[: SIZE - 1] == bytes(SIZE - 1)


def test_an_unaligned_address_is_refused_not_raised() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        assert not fault_in(address_of(memory) + 1, 4096, for_write=False)
        assert not ask_for_huge_pages(address_of(memory) + 1, 4096)


def test_the_address_is_that_of_the_buffer() -> None:
    buffer = bytearray(64)
    assert address_of(memoryview(buffer)[16:]) - address_of(buffer) == 16
    buffer.append(0)  # no export is left behind


def resident_bytes(address: int) -> int:
    """Bytes in memory of the `SIZE` that begin at ``address``, see mincore(2)."""
    pages = (ctypes.c_ubyte * (SIZE // PAGE_SIZE_BYTES))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * PAGE_SIZE_BYTES
