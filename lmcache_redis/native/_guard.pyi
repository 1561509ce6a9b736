# SPDX-License-Identifier: Apache-2.0
"""Guards mappings of memory that other processes may truncate. Implemented in `guard.c`, used by
`lmcache_redis.device.cpu`.

When an access would raise SIGBUS, fresh pages replace the whole mapping, and the access succeeds.
"""

def add(address: int, nbytes: int, /) -> int:
    """Guard a mapping of whole pages until `drop`; return its number. OSError: too many guards."""

def is_lost(number: int, /) -> bool:
    """Whether pages of the mapping were missing when they were accessed.

    Call it before an access, too: another handler of SIGBUS may have replaced the guard's.
    """

def drop(number: int, /) -> None:
    """Stop guarding the mapping; call this before unmapping."""
