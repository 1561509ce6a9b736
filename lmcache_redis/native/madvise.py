# SPDX-License-Identifier: Apache-2.0
"""Faulting memory in and asking for huge pages, without holding the GIL.

``mmap.mmap.madvise`` holds the GIL while the kernel works, which for gigabytes takes seconds; these
helpers call libc through ctypes, which releases it. They return a bool, because an older kernel may
refuse the advice: that is no error.
"""

from __future__ import annotations

import ctypes
import errno

PAGE_SIZE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23
_REFUSED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def address_of(buffer: object) -> int:
    """Address of the first byte of a writable, contiguous buffer (mmap, memoryview)."""
    # The ctypes object is temporary: it holds the buffer only until the address is read.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]


def ask_for_huge_pages(address: int, nbytes: int) -> bool:
    """MADV_HUGEPAGE on a page-aligned range. False if the kernel refuses."""
    return _madvise(address, nbytes, _MADV_HUGEPAGE)


def fault_in(address: int, nbytes: int, *, for_write: bool) -> bool:
    """Make every page of a page-aligned range present. Contents never change.

    Safe while other threads use the range. ``for_write`` breaks copy on write, which a private
    mapping needs; a shared mapping of a file is faulted in faster without it. False, and nothing is
    done, on a kernel before 5.14. Raises MemoryError if there is not enough memory.
    """
    return _madvise(address, nbytes, _MADV_POPULATE_WRITE if for_write else _MADV_POPULATE_READ)


def _madvise(address: int, nbytes: int, advice: int) -> bool:
    while _libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code in _REFUSED:
            return False
        raise MemoryError(f"{nbytes} bytes could not be faulted in: {errno.errorcode.get(code)}")
    return True
