# SPDX-License-Identifier: Apache-2.0
"""What servers answer that refuse: by the code of the reply the error, and what to change.

One table for all who meet such a reply: agents and the library (`wire.error_of`), and tools, which
read replies with redis-py (`admin.server`) or see the settings that lead to them (`admin.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from lmcache_redis.errors import (
    RedisAuthError,
    RedisClusterDown,
    RedisError,
    RedisFull,
    RedisReadOnly,
    RedisRedirect,
    RedisReplyError,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.net.commands import Use, shown


class Advice(NamedTuple):
    """kind: of the error. change: what to change, empty if only the server's own words say it."""

    kind: type[RedisError]
    change: str = ""


NAME_THE_CLUSTER: Final = "write redis+cluster://HOST:PORT instead of redis://HOST:PORT"
NAME_THE_PRIMARY: Final = "name the primary in the Redis URL, or its Sentinels"
_IS_A_CLUSTER: Final = f"a Redis Cluster: {NAME_THE_CLUSTER}"
_IS_A_REPLICA: Final = f"a replica: {NAME_THE_PRIMARY}"
_IS_FULL: Final = "set maxmemory-policy allkeys-lru, or a larger maxmemory"
_SAVE_FAILED: Final = 'its last save failed: set save "", or see its log and its disk'
NO_CONNECTION_LEFT: Final = "raise its maxclients"
_CHECK_PASSWORD: Final = "set the user and password of the Redis URL"
_NO_BACKEND: Final = "a proxy that reaches no server: see its backends"
_SENT: Final = (
    f"agents send {shown(Use.ALWAYS)}, with --ttl-refresh also {shown(Use.TTL_REFRESH)}, "
    f"with --warm-bytes {shown(Use.WARM)}: "
    "`lmcache-redis doctor` tries each"
)
# After the words of an error that is no reply.
LOST: Final = (
    "if Redis is up, see its client-output-buffer-limit and maxmemory-clients, and the proxies "
    "before it"
)
SILENT: Final = "if it answers PING: overload, a slow link, or a proxy that reaches no server"

BY_CODE: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        "OOM": Advice(RedisFull, _IS_FULL),
        "NOAUTH": Advice(RedisAuthError, _CHECK_PASSWORD),
        "WRONGPASS": Advice(RedisAuthError, _CHECK_PASSWORD),
        "NOPERM": Advice(RedisReplyError),  # see `missing_right`
        "LOADING": Advice(RedisUnavailable, "it loads its data: it ends by itself"),
        "BUSY": Advice(RedisUnavailable, "a script of another program runs: SCRIPT KILL"),
        "MASTERDOWN": Advice(RedisUnavailable, _IS_A_REPLICA),
        "TRYAGAIN": Advice(RedisUnavailable, "its slots are being moved: it ends by itself"),
        "CLUSTERDOWN": Advice(
            RedisClusterDown, "a shard is missing: see `redis-cli --cluster check`"
        ),
        "CROSSSLOT": Advice(RedisReplyError, _IS_A_CLUSTER),
        "MOVED": Advice(RedisRedirect, _IS_A_CLUSTER),
        "ASK": Advice(RedisRedirect, _IS_A_CLUSTER),
        "READONLY": Advice(RedisReadOnly, _IS_A_REPLICA),
        "NOREPLICAS": Advice(RedisWriteRefused, "start its replicas: see min-replicas-to-write"),
        "MISCONF": Advice(RedisWriteRefused, _SAVE_FAILED),
        "ERR": Advice(RedisReplyError),
    }
)
OTHER: Final = "other"
# What refusals are counted by. No server can add to it.
REASONS: Final = (*BY_CODE, OTHER)

_BY_TEXT: Final = (
    (re.compile("max number of clients"), Advice(RedisUnavailable, NO_CONNECTION_LEFT)),
    # Envoy and twemproxy.
    (
        re.compile(r"(?i)upstream|no healthy|no backend|connection refused|server ejected"),
        Advice(RedisReplyError, _NO_BACKEND),
    ),
)
_RIGHT = re.compile(r"(?i)(?:user (?P<user>\S+) has )?no permissions to run the '(?P<name>[^']+)'")
_KEYS = re.compile(r"(?i)no permissions to access (?:a|one of the) keys?")


def reason_of(code: str) -> str:
    """Which of `REASONS` a reply with this code is counted as."""
    return code if code in BY_CODE else OTHER


def advice_on(code: str, text: str) -> Advice:
    """code, text: of an error reply; the text may lack the code."""
    if code == "NOPERM":
        parts = filter(None, (missing_right(text), _SENT))
        return Advice(BY_CODE[code].kind, "; ".join(parts))
    if code in BY_CODE and code != "ERR":
        return BY_CODE[code]
    found = (advice for pattern, advice in _BY_TEXT if pattern.search(text))
    return next(found, Advice(RedisReplyError))


def advised(text: str, change: str) -> str:
    """A sentence, and what to change."""
    return f"{text} ({change})" if change else text


def missing_right(text: str) -> str:
    """How to allow what a NOPERM refuses; empty if the server does not name it."""
    if (match := _RIGHT.search(text)) is not None:
        user = match["user"] if match["user"] not in (None, "this") else "USER"
        return f"ACL SETUSER {user} +{match['name'].lower()}"
    if _KEYS.search(text) is not None:
        return "ACL SETUSER USER ~PREFIXlmcr2:*, PREFIX being --key-prefix"
    return ""
