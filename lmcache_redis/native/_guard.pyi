"""Mappings of memory that other processes may truncate; implemented in `guard.c`, used by
`lmcache_redis.device.mapping`.

After an access that would raise SIGBUS, fresh pages replace the whole mapping.
"""

def add(address: int, nbytes: int, /) -> int:
    """Guard a mapping of whole pages until `drop`; its number. OSError: there are too many."""

def is_lost(number: int, /) -> bool:
    """Whether pages of it were missing when they were accessed."""

def drop(number: int, /) -> None:
    """Stop guarding it; call this before unmapping."""
