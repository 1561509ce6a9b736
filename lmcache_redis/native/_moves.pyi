"""Stripes between slots and sockets; `moves.c` has the how, `lmcache_redis.resp.moving` the use.
And commands of many keys, packed (`lmcache_redis.resp.wire`).

A task is ``(command, header, payload, end)``, all buffers. To load: the packed GET; ``$length``
CRLF and the expected header, its unknown fields zero; the slot; nothing. To store: the packed SET
up to its value; the header, into which the checksums are written; the slot; what ends the command.
Payloads have more than 240 bytes.

The first `under_way` tasks have been asked for on the first lanes, in order. The others are sent
in order as lanes become free. Without `drain` the call ends once all have been sent, so that
lanes are busy while the caller looks at what was done; with it, once all have been done.
It ends early when nothing came for `quiet_ms`, when `until` (`time.monotonic()`) has passed, and
when anything happens that is not as expected.
"""

from typing_extensions import Buffer

Task = tuple[Buffer, Buffer, Buffer, Buffer]

# lanes: for each task that was sent the number of its lane. done: for each that is done, in order
# (those under way first), its store id (nothing after a store). why: see `resp.moving.Why`. lane:
# the one on which the next task could not be sent, or -1. moved: bytes, of the payload and what
# follows it (PART), of a load's other reply that stand in the slot behind `first` (REPLY), or of
# the whole command (SENT_PART). error: errno, 0 where the connection was closed (LOST, SEND_LOST).
# first: what came of the reply before its payload (REPLY, PART, VALUE).
# tail: the two bytes after the payload (PART, VALUE).
Result = tuple[list[int], list[bytes], int, int, int, int, bytes, bytes]

def load(
    lanes: list[int],
    tasks: list[Task],
    under_way: int,
    drain: bool,
    quiet_ms: int,
    until: float,
    verify: bool,
    /,
) -> Result: ...
def store(
    lanes: list[int],
    tasks: list[Task],
    under_way: int,
    drain: bool,
    quiet_ms: int,
    until: float,
    /,
) -> Result: ...
def keys_commands(name: bytes, keys: list[bytes], group_keys: int, /) -> bytes: ...
def xxh3_64(data: Buffer, step: int = 0, /) -> int: ...
def use_vectors(name: str, /) -> bool: ...
