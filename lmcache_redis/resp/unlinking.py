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


def remove_chunk(
    nodes: DataNodes,
    key: bytes,
    deadline: float,
    done: Done[RemoveResult],
    stripe_count: int,
    only_store: bytes,
) -> None:
    """See `RedisPlane.remove`."""
    removed = 0  # stripe 0, if it was the first

    def unlinked(outcome: CallOutcome, replies: Sequence[int | None]) -> None:
        counts = [reply for reply in replies if reply is not None]
        if outcome is CallOutcome.DONE and len(counts) < len(replies):
            outcome = CallOutcome.UNAVAILABLE
        done(RemoveResult(outcome, removed + sum(counts)))

    def hidden(outcome: CallOutcome, found: Sequence[tuple[int, int] | None]) -> None:
        nonlocal removed
        if outcome is not CallOutcome.DONE or (first := found[0]) is None:
            is_done = outcome is CallOutcome.DONE
            done(RemoveResult(CallOutcome.UNAVAILABLE if is_done else outcome))
            return
        removed, stripes = first
        others = range(1, max(stripes, stripe_count) if stripes else 0)
        try:
            unlink([stripe_key(key, index) for index in others])
        except RuntimeError:  # the plane was closed in the meantime
            done(RemoveResult(CallOutcome.CANCELLED, removed))

    def unlink(names: Sequence[bytes]) -> None:
        nodes.ask_for_each(_UNLINKS, deadline, None, names, unlinked)

    if stripe_count and not only_store:
        unlink([stripe_key(key, index) for index in range(stripe_count)])
    else:
        steps = partial(_unlink_first, only_store)
        nodes.ask_for_each(steps, deadline, None, [stripe_key(key, 0)], hidden)


def _unlink_first(only_store: bytes, keys: Sequence[bytes]) -> Steps[list[Any]]:
    """UNLINK the stripe 0 of a chunk, unless another store than the named one has written it.

    One result: how many keys were deleted, and how many stripes the chunk has, 1 if that cannot be
    seen, 0 if it stays; or a RedisRedirect. The header is a GETRANGE, which may be refused.
    """
    question, unlink = header_commands(keys), keys_commands(b"UNLINK", keys)
    if only_store:
        connection = yield (question,), 1
        header = parse_header(connection.receive_all()[0])
        if header is not None and header.store_id != only_store:
            return [(0, 0)]
        connection = yield (unlink,), 1
        (reply,) = connection.receive_all()
    else:
        connection = yield (question, unlink), 2
        told, reply = connection.receive_all()
        header = parse_header(told)
    removed = result_of(reply, parse_count)
    if isinstance(removed, RedisRedirect):
        return [removed]
    return [(removed, header.stripe_count if header is not None else 1)]
