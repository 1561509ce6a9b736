# SPDX-License-Identifier: Apache-2.0
"""The removal of a chunk: UNLINK of stripe 0, which hides it, then of the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import (
    STEP_KEYS,
    Steps,
    ask_each,
    header_commands,
    parse_count,
    parse_header,
    result_of,
)
from lmcache_redis.resp.net.wire import keys_commands
from lmcache_redis.resp.node import DataNodes
from lmcache_redis.tiers import CallOutcome, Done, RemoveResult

_UNLINKS = partial(ask_each, partial(keys_commands, b"UNLINK"), parse_count, step_keys=STEP_KEYS)
# What `_unlink_first` has found.
_First = tuple[int, int]
_NEWER: _First = (0, -1)


def remove_chunk(
    nodes: DataNodes,
    key: bytes,
    deadline: float,
    done: Done[RemoveResult],
    stripe_count: int,
    newest_unix_ms: int | None,
) -> None:
    """See `RedisPlane.remove`."""
    removed = 0  # stripe 0, if it was the first

    def unlinked(outcome: CallOutcome, replies: Sequence[int | None]) -> None:
        counts = [reply for reply in replies if reply is not None]
        if outcome is CallOutcome.DONE and len(counts) < len(replies):
            outcome = CallOutcome.UNAVAILABLE
        done(RemoveResult(outcome, removed + sum(counts), stripe_count))

    def hidden(outcome: CallOutcome, found: Sequence[_First | None]) -> None:
        nonlocal removed, stripe_count
        if outcome is not CallOutcome.DONE or (first := found[0]) is None:
            is_done = outcome is CallOutcome.DONE
            done(RemoveResult(CallOutcome.UNAVAILABLE if is_done else outcome))
            return
        if first == _NEWER:
            done(RemoveResult(CallOutcome.DONE))
            return
        removed, seen = first
        stripe_count = max(stripe_count, seen)
        try:
            unlink(range(1, stripe_count))
        except RuntimeError:  # the plane was closed in the meantime
            done(RemoveResult(CallOutcome.CANCELLED, removed, stripe_count))

    def unlink(stripes: range) -> None:
        names = [stripe_key(key, index) for index in stripes]
        nodes.ask_for_each(_UNLINKS, deadline, names, unlinked, is_write=True)

    if stripe_count and newest_unix_ms is None:
        unlink(range(stripe_count))
    else:
        steps = partial(_unlink_first, newest_unix_ms)
        nodes.ask_for_each(steps, deadline, [stripe_key(key, 0)], hidden, is_write=True)


def _unlink_first(newest_unix_ms: int | None, keys: Sequence[bytes]) -> Steps[list[Any]]:
    """UNLINK the stripe 0 of a chunk, unless it says that it was stored later than that.

    One result: how many keys were deleted, and how many stripes the chunk has, 0 if that cannot be
    seen; `_NEWER` if it stays; or a RedisRedirect. The header is a GETRANGE, which may be refused.
    """
    question, unlink = header_commands(keys), keys_commands(b"UNLINK", keys)
    if newest_unix_ms is None:
        connection = yield (question, unlink), 2
        told, reply = connection.receive_all()
        header = parse_header(told)
    else:
        connection = yield (question,), 1
        header = parse_header(connection.receive_all()[0])
        if header is not None and header.created_unix_ms > newest_unix_ms:
            return [_NEWER]
        connection = yield (unlink,), 1
        (reply,) = connection.receive_all()
    removed = result_of(reply, parse_count)
    if isinstance(removed, RedisRedirect):
        return [removed]
    return [(removed, header.stripe_count if header is not None else 0)]
