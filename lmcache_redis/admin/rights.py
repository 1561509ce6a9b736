"""Whether a user may send the commands that agents send: each is tried, as the agent would.

What is written names no stripe; it is removed, or expires.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_redis.admin.server import CONNECT_TIMEOUT_S, OP_TIMEOUT_S, Primary, PrimaryServers
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.net.commands import COMMANDS, DATABASE, KEY, SERVICE, Command, Use, needed
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.net.wire import ErrorReply, pack_command
from lmcache_redis.resp.options import user_of, uses_of

_CLIENT_NAME = "lmcache-redis-doctor"
_Values = dict[str | int, bytes | str | int]


@dataclass(frozen=True, slots=True)
class Rights:
    """user: who tried; empty if only a credential provider knows it. agent: the user of this node's
    agent; empty if that is not known. tried: names of commands. refused: those of them that were,
    on a server or a Sentinel.
    """

    user: str
    agent: str
    tried: tuple[str, ...]
    refused: tuple[str, ...]


def sent_by_agents(
    server: PrimaryServers, ttl_refresh: bool, report: Mapping[str, Any] | None
) -> tuple[Command, ...]:
    """The commands of agents with these servers. report: of one, which knows what it uses."""
    wanted = needed(uses_of(server.deployment, ttl_refresh))
    if report is not None and (names := report["redis"].get("commands")) is not None:
        wanted = tuple(each for each in COMMANDS if each.name in names)
    return wanted


def try_rights(
    server: PrimaryServers,
    node: Primary,
    key: bytes,
    wanted: Iterable[Command],
    report: Mapping[str, Any] | None,
) -> Rights:
    """Tries each command. key: one of the node's, which names no stripe.

    Raises RedisError if the connection to the server fails.
    """
    deployment, agent = server.deployment, "" if report is None else report["redis"].get("user", "")
    values: _Values = {KEY: key, DATABASE: node.endpoint.db, SERVICE: deployment.service}
    tried = tuple(wanted)
    of_servers = [each for each in tried if each.use is not Use.SENTINEL]
    refused = _refused(node.endpoint, of_servers, values)
    of_sentinels = [each for each in tried if each.use is Use.SENTINEL]
    for seed in deployment.seeds if of_sentinels else ():
        with contextlib.suppress(RedisError):  # of several, one may be down
            refused |= _refused(seed, of_sentinels, values)
    return Rights(
        user_of(node.endpoint.credentials),
        agent,
        tuple(each.name for each in tried),
        tuple(each.name for each in tried if each in refused),
    )


def _refused(endpoint: Endpoint, wanted: Iterable[Command], values: _Values) -> set[Command]:
    connector = Connector(endpoint, CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
    refused = set()
    # One after the other: a subscription, which is the last one, takes no other command.
    with contextlib.closing(connector.open(_CLIENT_NAME)) as connection:
        for each in wanted:
            connection.arm(time.monotonic() + OP_TIMEOUT_S)
            words = [values.get(word, word) for word in each.words]
            connection.send((pack_command(*words),), 1)
            (reply,) = connection.receive_all()
            if isinstance(reply, ErrorReply) and _is_refusal(reply):
                refused.add(each)
    return refused


def _is_refusal(reply: ErrorReply) -> bool:
    """Any other error is not about the command: the server is full, or a replica."""
    return reply.code == "NOPERM" or "unknown command" in reply.text.lower()
