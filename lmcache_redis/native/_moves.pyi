# SPDX-License-Identifier: Apache-2.0
"""Stripes between slots and sockets: `moves.c` explains how, `lmcache_redis.resp.bulk` uses it.

`load` and `store` take the fields of `resp.bulk.MoveCall`, and return those of
`resp.bulk.Moved`. A lane is ``(file descriptor, progress)``: a buffer of PROGRESS_BYTES, which the
caller keeps from call to call and never reads. Without `drain` a call returns once all tasks have
been sent, so that lanes are busy while the caller processes the results; with it, once all are
finished. It returns early when nothing arrives for `quiet_ms`, when `until` has passed, and after
the first stripe that fails. If the header expected by a load has the flag of sealed values, the
result is the header found: the payload is still sealed.
"""

from collections.abc import Callable

from typing_extensions import Buffer

Lane = tuple[int, bytearray]
Task = tuple[Buffer, Buffer, Buffer, Buffer]
# Lanes of the tasks that were sent; results; whether the last was sent whole.
Result = tuple[list[int], list[bytes | tuple[int, int, bytes]], int]

PROGRESS_BYTES: int

load: Callable[[list[Lane], list[Task], int, bool, bool, float, bool, int], Result]
store: Callable[[list[Lane], list[Task], int, bool, bool, float, bool, int], Result]

def xxh3_64(data: Buffer, step: int = 0, /) -> int: ...
def use_vectors(name: str, /) -> bool: ...
