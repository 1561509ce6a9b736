"""Mappings of memory that other processes may truncate; `guard.c` has the how,
`lmcache_redis.device.mapping` the use.

An access that would be SIGBUS finds fresh pages in place of the whole mapping from then on.
"""

def add(address: int, nbytes: int, /) -> int:
    """Guard a mapping of whole pages until `drop`; its number. OSError: there are too many."""

def is_lost(number: int, /) -> bool:
    """Whether pages of it were missing when they were accessed."""

def drop(number: int, /) -> None:
    """Guard it no longer; before it is unmapped."""
