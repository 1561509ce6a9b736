# SPDX-License-Identifier: Apache-2.0
"""Numbers in Redis that several agents add to, as steps of a control connection (`control`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from lmcache_redis.errors import RedisError, RedisProtocolError
from lmcache_redis.resp.control import STEP_KEYS, Steps, ask_each
from lmcache_redis.resp.net.wire import Reply, keys_commands, pack_command

_MADE: Final = object()  # the key is there


def add_each(
    amounts: Mapping[bytes, int],
    ttl_s: int,
    note: Callable[[RedisError], None],
    keys: Sequence[bytes],
    is_asking: bool = False,
) -> Steps[list[Any]]:
    """The number under each key, 0 where there is none, once its amount is added.

    A key is made with the TTL, which later additions leave alone. note: told of each refusal. None:
    not known. A RedisError: the server does not take the amount now. Then, and with a
    RedisRedirect, nothing was added.
    """

    def refused(error: RedisError) -> RedisError | None:
        note(error)
        # A user without the right never adds anything: no caller waits for it.
        return None if error.refusal == "NOPERM" else error

    results: dict[bytes, Any] = dict.fromkeys(keys)
    added = [key for key in keys if key in amounts]
    rest = [key for key in keys if key not in amounts]
    ask = partial(ask_each, step_keys=STEP_KEYS, is_asking=is_asking, refused=refused)
    made = yield from ask(partial(_make, ttl_s), _parse_made, added)
    results.update(zip(added, made, strict=True))
    added = [key for key in added if results[key] is _MADE]
    sums = yield from ask(partial(_add, amounts), _parse_sum, added)
    results.update(zip(added, sums, strict=True))
    found = yield from ask(partial(keys_commands, b"GET"), _parse_number, rest)
    results.update(zip(rest, found, strict=True))
    return [results[key] for key in keys]


def _make(ttl_s: int, keys: Sequence[bytes]) -> bytes:
    return b"".join([pack_command(b"SET", key, 0, b"NX", b"EX", ttl_s) for key in keys])


def _add(amounts: Mapping[bytes, int], keys: Sequence[bytes]) -> bytes:
    return b"".join([pack_command(b"INCRBY", key, amounts[key]) for key in keys])


def _parse_made(reply: Reply) -> object:
    if reply not in (None, b"OK"):
        raise RedisProtocolError("malformed reply to SET: expected OK or nothing")
    return _MADE


def _parse_sum(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise RedisProtocolError("malformed reply to INCRBY: expected a number")
    return reply


def _parse_number(reply: Reply) -> int | None:
    """None: somebody else's value."""
    if reply is None:
        return 0
    if not isinstance(reply, bytes):
        raise RedisProtocolError("malformed reply to GET: expected a string")
    return int(reply) if reply.isdigit() and len(reply) < 20 else None
