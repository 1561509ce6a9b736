"""The steps of questions about keys (`control.Steps`): their commands and replies.

On one server an EXISTS counts a group of 32 keys, and many groups are sent in one write. A second
question is asked only about a group of which some keys exist. 1,000 keys take 0.3 ms, against 7.5
ms with one EXISTS a key (docs/data-plane.md). A prefix ends at the first missing key, and is
answered while the server still works on the rest. In a cluster a command has one key.

Steps raise what the pipeline raises, and RedisProtocolError for malformed replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmcache_redis.errors import FormatError, RedisProtocolError, RedisRedirect
from lmcache_redis.resp.control import Request, Steps
from lmcache_redis.resp.net.connection import Pipeline
from lmcache_redis.resp.net.wire import (
    ASKING_COMMAND,
    ErrorReply,
    KeyScan,
    Reply,
    error_of,
    keys_command,
    keys_commands,
    pack_command,
    without_errors,
)
from lmcache_redis.stripe import HEADER_BYTES, StripeHeader, describe_header

GROUP_KEYS = 32
# Groups in a write. The first write is small: the server starts at once, and works while the next
# write is packed.
_FIRST_GROUPS = 2
_WRITE_GROUPS = 32
# Keys of one UNLINK, and the COUNT of a SCAN: well under a millisecond of the server's time.
STEP_KEYS = 512


# ------------------------------------------------------ groups of keys, one server


def count_prefix(keys: Sequence[bytes], suffix: bytes = b"") -> Steps[int]:
    """How many of the leading keys, each with `suffix` at its end, exist up to the first gap.

    May leave replies outstanding that are not needed.
    """
    pipeline = yield _in_groups(keys, GROUP_KEYS, suffix)
    before = 0
    least = 1
    while before < len(keys):
        for found in _counts(pipeline.receive(least), keys, before, GROUP_KEYS):
            group = keys[before : before + GROUP_KEYS]
            if found == 0:
                return before
            if found < len(group):
                return before + _first_gap(pipeline, group, found, suffix)
            before += GROUP_KEYS
        # Each wake-up of this thread costs the server time, too.
        least = -(-pipeline.outstanding // 2)
    return len(keys)


def _first_gap(pipeline: Pipeline, group: Sequence[bytes], found: int, suffix: bytes) -> int:
    """The first gap in a group of which `found` keys exist, asked after what is outstanding.

    Almost always the first keys exist, and one EXISTS of them says so. Then the replies about each
    single key, which are asked for in the same write, are not awaited.
    """
    earlier = pipeline.outstanding
    of_leading = keys_command(b"EXISTS", group[:found], suffix)
    pipeline.send((of_leading + keys_commands(b"EXISTS", group, 1, suffix),), 1 + len(group))
    replies = [*pipeline.receive(earlier + 1)]
    (of_first,) = _counts(replies[earlier : earlier + 1], group[:found], 0, found)
    if of_first == found:
        return found
    if pipeline.outstanding:
        replies += pipeline.receive(pipeline.outstanding)
    for number, there in enumerate(_counts(replies[earlier + 1 :], group, 0, 1)):
        if not there:
            return number
    # No gap now: the missing key was stored since. The later groups are not asked again.
    return len(group)


def find_present(keys: Sequence[bytes], suffix: bytes = b"") -> Steps[list[int]]:
    """For each key, with `suffix` at its end, 1 if it exists, else 0."""
    pipeline = yield _in_groups(keys, GROUP_KEYS, suffix)
    groups = [keys[start : start + GROUP_KEYS] for start in range(0, len(keys), GROUP_KEYS)]
    counts = _all_counts(pipeline, keys, GROUP_KEYS)
    unclear = [g for g, found in zip(groups, counts, strict=True) if 0 < found < len(g)]
    one_by_one = [key for group in unclear for key in group]
    pipeline.send(*_in_groups(one_by_one, 1, suffix))
    looked_up = iter(_all_counts(pipeline, one_by_one, 1))
    present: list[int] = []
    for group, found in zip(groups, counts, strict=True):
        if 0 < found < len(group):
            present += itertools.islice(looked_up, len(group))
        else:
            present += [found > 0] * len(group)
    return present


def _all_counts(pipeline: Pipeline, keys: Sequence[bytes], group_keys: int) -> list[int]:
    """How many keys of each group exist; the groups have been asked for."""
    return (
        list(_counts(pipeline.receive(pipeline.outstanding), keys, 0, group_keys)) if keys else []
    )


def _in_groups(keys: Sequence[bytes], group_keys: int, suffix: bytes) -> Request:
    """The commands, packed on demand, and their number."""
    first = group_keys * _FIRST_GROUPS
    step = group_keys * _WRITE_GROUPS
    ends = [0, *range(first, len(keys), step), len(keys)] if keys else []
    requests = (
        keys_commands(b"EXISTS", keys[start:end], group_keys, suffix)
        for start, end in itertools.pairwise(ends)
    )
    return requests, -(-len(keys) // group_keys)


def _counts(
    replies: Sequence[Reply], keys: Sequence[bytes], before: int, group_keys: int
) -> Iterator[int]:
    """The replies as counts of groups; the first group begins at key `before`."""
    for reply in replies:
        most = min(group_keys, len(keys) - before)
        if not isinstance(reply, int) or not 0 <= reply <= most:
            raise RedisProtocolError("the reply to an EXISTS is no count of its keys")
        yield reply
        before += group_keys


# ------------------------------------------------------- one key a command; all keys


def ask_each(
    command_of: Callable[[bytes], bytes],
    parse: Callable[[Reply], Any],
    keys: Sequence[bytes],
    *,
    asking: bool,
    step_keys: int | None = None,
) -> Steps[list[Any]]:
    """A command for each key: its reply parsed, None for another type, or a RedisRedirect.

    asking: send ASKING before each. step_keys: keys of a step; None: all keys in one step.
    """
    step_keys = step_keys or max(1, len(keys))
    stride, before = (2, ASKING_COMMAND) if asking else (1, b"")
    results: list[Any] = []
    for start in range(0, len(keys), step_keys):
        some = keys[start : start + step_keys]
        request = b"".join([before + command_of(key) for key in some])
        pipeline = yield iter((request,)), stride * len(some)
        results += [_result(reply, parse) for reply in pipeline.receive_all()[stride - 1 :: stride]]
    return results


def _result(reply: Reply, parse: Callable[[Reply], Any]) -> Any:
    if not isinstance(reply, ErrorReply):
        return parse(reply)
    if reply.code == "WRONGTYPE":
        return None
    error = error_of(reply)
    if isinstance(error, RedisRedirect):
        return error
    raise error


def walk_keys(
    pattern: bytes,
    found: Callable[[list[bytes]], Sequence[bytes]],
    *more: str,
    removed: Callable[[int], None] = lambda count: None,
    group_keys: int = 1,
) -> Steps[None]:
    """SCAN a server for keys that match, and UNLINK those of them that `found` returns.

    removed: called with how many keys were deleted. group_keys: the most keys of an UNLINK. more:
    see `KeyScan`.
    """
    scan = KeyScan(pattern, STEP_KEYS, *more)
    while not scan.is_over:
        pipeline = yield iter((scan.command(),)), 1
        (reply,) = pipeline.receive(1)
        if unwanted := found(scan.take(reply)):
            request = keys_commands(b"UNLINK", unwanted, group_keys)
            pipeline = yield iter((request,)), -(-len(unwanted) // group_keys)
            for count in without_errors(pipeline.receive_all()):
                if not isinstance(count, int) or count < 0:
                    raise RedisProtocolError("the reply to an UNLINK is no count")
                removed(count)


def parse_count(reply: Reply) -> int:
    """The reply to an EXISTS or UNLINK of one key."""
    if reply == 0 or reply == 1:
        return 1 if reply else 0
    raise RedisProtocolError("the reply to a command with one key is no count of it")


def parse_header(reply: Reply) -> StripeHeader | None:
    """The header in the reply to a GETRANGE; None if it is no header."""
    if not isinstance(reply, bytes):
        raise RedisProtocolError("the reply to a GETRANGE is no string")
    try:
        return describe_header(reply)
    except FormatError:
        return None


def exists_command(key: bytes) -> bytes:
    return keys_command(b"EXISTS", (key,))


def unlink_command(key: bytes) -> bytes:
    return keys_command(b"UNLINK", (key,))


def header_command(key: bytes) -> bytes:
    return pack_command(b"GETRANGE", key, 0, HEADER_BYTES - 1)
