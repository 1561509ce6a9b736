# SPDX-License-Identifier: Apache-2.0
"""Whether a user may send the commands that agents send: each is tried, as the agent would.

Servers are found as agents find them: on Sentinels redis-py needs more rights for that. What is
written names no stripe; it is removed, or expires.
"""

from __future__ import annotations

import contextlib
import enum
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Finding, advised
from lmcache_redis.admin.server import CONNECT_TIMEOUT_S, OP_TIMEOUT_S
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp.finder import find_servers
from lmcache_redis.resp.net.commands import (
    CHANNEL,
    COMMANDS,
    DATABASE,
    KEY,
    SERVICE,
    TOOLS,
    Command,
    Use,
    needed,
    removal_channels,
)
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.net.wire import ErrorReply, escape_pattern, pack_command
from lmcache_redis.resp.options import Deployment, Topology, user_of, uses_of
from lmcache_redis.units import printable

_CLIENT_NAME = "lmcache-redis-doctor"
_Values = Mapping[bytes | str | int, bytes | str | int]
# As Redis 6.2 says it, or later versions and Valkey.
_DENIED = re.compile(
    r"no permissions to (?:(?P<command>run the .* command)|access (?:an?|one of the) "
    r"(?:(?P<keys>keys?)|(?P<channels>channels?)))(?: or its subcommand| used as arguments)?",
    re.IGNORECASE,
)


class Refusal(enum.Enum):
    """What a server refuses. OTHER: it says something else than servers that are known."""

    COMMAND = "command"
    KEYS = "keys"
    CHANNELS = "channels"
    UNKNOWN = "unknown"  # it knows no such command
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rights:
    """What one server allows; of a Sentinel, what it is asked.

    user: who tried; empty if only a credential provider knows it. agent: the user of this node's
    agent; empty if that is not known. tried: names of commands. refused: those of them that were,
    and why. keys: a pattern of the keys of chunks. failure: why not all could be tried.
    """

    where: str
    user: str = ""
    agent: str = ""
    tried: tuple[str, ...] = ()
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    keys: str = ""
    failure: str = ""


def sent_by_agents(
    deployment: Deployment, ttl_refresh: bool, report: Mapping[str, Any] | None
) -> tuple[Command, ...]:
    """The commands of agents with these servers. report: of one, which knows what it uses."""
    wanted = needed(uses_of(deployment, ttl_refresh))
    if report is not None and (names := report["redis"].get("commands")) is not None:
        wanted = tuple(each for each in COMMANDS if each.name in names)
    return wanted


def probe_key(prefix: bytes) -> bytes:
    """A key that the rights of agents cover (prefix and `lmcr2:`) and that names no stripe."""
    return b"%b%bdoctor:%b" % (prefix, KEY_MAGIC, secrets.token_hex(16).encode())


def try_rights(
    deployment: Deployment,
    prefix: bytes,
    wanted: Collection[Command],
    report: Mapping[str, Any] | None,
) -> tuple[Rights, ...]:
    """The rights on each server that agents find, and on each Sentinel. Raises nothing.

    In a cluster most servers answer that the key is elsewhere, after they have looked at rights.
    """
    of_sentinels = [each for each in wanted if each.use is Use.SENTINEL]
    of_servers = [each for each in wanted if each.use is not Use.SENTINEL]
    agent = "" if report is None else report["redis"].get("user", "")
    keys = escape_pattern(prefix + KEY_MAGIC) + b"*"
    values: _Values = {
        KEY: probe_key(prefix),
        DATABASE: deployment.server.db,
        CHANNEL: removal_channels(deployment.server.db)[0],
        SERVICE: deployment.service,
    }
    found = [
        replace(
            _tried(server, of_servers, values),
            agent=agent,
            keys=printable(keys.decode("utf-8", "backslashreplace")),
        )
        for server in _found(deployment)
    ]
    if deployment.topology is Topology.SENTINEL:
        found += [_tried(seed, of_sentinels, values) for seed in deployment.seeds]
    return tuple(found)


def _found(deployment: Deployment) -> Sequence[Endpoint]:
    """The data servers; if they are not told, those of them that are named."""
    try:
        return find_servers(deployment, OP_TIMEOUT_S)
    except (RedisError, ConfigError):
        return deployment.seeds if deployment.topology is Topology.CLUSTER else ()


def _tried(endpoint: Endpoint, wanted: Iterable[Command], values: _Values) -> Rights:
    found = Rights(endpoint.where, user_of(endpoint.credentials))
    # The database is chosen by one of the commands.
    connector = Connector(replace(endpoint, db=0), CONNECT_TIMEOUT_S, OP_TIMEOUT_S)
    tried, refused = [], {}
    try:
        # One after the other: a subscription, which is the last one, takes no other command.
        with contextlib.closing(connector.open(_CLIENT_NAME)) as connection:
            for each in wanted:
                connection.arm(time.monotonic() + OP_TIMEOUT_S)
                words = [values.get(word, word) for word in each.words]
                connection.send((pack_command(*words),), 1)
                (reply,) = connection.receive_all()
                tried.append(each.name)
                if isinstance(reply, ErrorReply) and (why := refusal_of(reply)) is not None:
                    refused[each.name] = why
    except (RedisError, ConfigError) as error:
        found = replace(found, failure=str(error))
    return replace(found, tried=tuple(tried), refused=refused)


def refusal_of(reply: ErrorReply) -> Refusal | None:
    """None for an error that is not about rights: a server is full, a replica, or lacks the key."""
    if reply.code == "NOPERM":
        match = _DENIED.search(reply.text)
        return Refusal.OTHER if match is None else Refusal(match.lastgroup)
    return Refusal.UNKNOWN if "unknown command" in reply.text.lower() else None


# --------------------------------------------------------------------- judged


ADVICE: dict[str, tuple[str, ...]] = {"rights": ("",), "tools": ("",)}


def judge_rights(rights: Sequence[Rights]) -> list[Finding]:
    """The findings, each with its server's address, the most important first. Pure."""
    found = [replace(each, where=on.where) for on in rights for each in _judged(on)]
    for on in rights:
        if on.agent and on.user and on.agent != on.user:
            seen = f"tried as {on.user}, and this node's agent is the user {on.agent}"
            why = "what the agent itself may do has not been tried"
            change = (f"run doctor with --redis-username {on.agent} and its password",)
            found.append(Finding(HINT, "rights", seen, why, change, on.where))
            break  # it is the same on all servers
    return advised(found, ADVICE)


def _judged(on: Rights) -> Iterator[Finding]:
    if on.failure:
        yield Finding(WARNING, "rights", f"not all could be tried: {on.failure}")
    user, setting = on.user or "the credential provider's user", f"ACL SETUSER {on.user or 'USER'}"
    of: dict[Refusal, list[Command]] = {why: [] for why in Refusal}
    for each in COMMANDS:
        if each.name in on.refused:
            of[on.refused[each.name]].append(each)
    for each in of[Refusal.COMMAND]:
        seen = f"{each.shown}, which agents send, is refused to {user}"
        yield _refused([each], seen, f"without it {each.without}", f"{setting} +{each.name}")
    for each in of[Refusal.UNKNOWN]:
        seen = f"{each.shown}, which agents send, is unknown to the server"
        change = f"redis.conf: no rename-command {each.shown.split()[0]}"
        yield _refused([each], seen, f"without it {each.without}", change)
    if of[Refusal.KEYS]:
        seen = f"the keys {on.keys} are refused to {user}, for {_listed(of[Refusal.KEYS])}"
        why = "all chunks are under these keys"
        yield _refused(of[Refusal.KEYS], seen, why, f"{setting} ~{on.keys}")
    for each in of[Refusal.CHANNELS]:
        seen = f"the channels that agents {each.shown} to are refused to {user}"
        yield _refused([each], seen, f"without them {each.without}", f"{setting} &__keyevent@*")
    if of[Refusal.OTHER]:
        seen = f"refused to {user}: {_listed(of[Refusal.OTHER])}"
        yield _refused(of[Refusal.OTHER], seen, "agents send them", "compare ACL GETUSER")
    if on.tried and not on.refused:
        sent = _listed(each for each in COMMANDS if each.name in on.tried)
        yield Finding(OK, "rights", f"{user} may send what agents send: {sent}")


def _refused(commands: Iterable[Command], seen: str, why: str, change: str) -> Finding:
    severity = CRITICAL if any(each.is_vital for each in commands) else WARNING
    return Finding(severity, "rights", seen, why, (change,))


def _listed(commands: Iterable[Command]) -> str:
    return ", ".join(each.shown for each in commands)


def tools_refused(deployment: Deployment, rights: Sequence[Rights]) -> Finding:
    """That redis-py may not ask the servers, or their Sentinels, as this user."""
    refused = [
        each for each in ("select", "cluster|slots") if any(each in on.refused for on in rights)
    ]
    more = next((TOOLS[use] for use in uses_of(deployment, False) if use in TOOLS), refused)
    at, asked = deployment.server, "the servers"
    if deployment.topology is Topology.SENTINEL:
        at, asked = deployment.seeds[0], "the Sentinels"
    sent = ", ".join(each.upper().replace("|", " ") for each in more)
    rules = " ".join(f"+{each}" for each in more)
    return Finding(
        WARNING,
        "tools",
        "only rights were checked: this user may not send what tools send",
        f"they also send {sent} to {asked}",
        (
            "run doctor as the user of the tools too (docs/guides/redis.md)",
            f"or ACL SETUSER {user_of(at.credentials) or 'USER'} {rules}",
        ),
        deployment.url,
    )
