# SPDX-License-Identifier: Apache-2.0
"""The commands that agents send to servers: what their users need rights for.

Doctor tries them, the page about Redis is held to them, and the advice after a NOPERM names them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final, NamedTuple

# In `Command.words`: what stands for a key of ours, the database, a channel of it, and the name of
# a master.
KEY: Final = "\0key"
DATABASE: Final = "\0database"
CHANNEL: Final = "\0channel"
SERVICE: Final = "\0service"
_EXPIRES_S = 60


class Use(enum.Enum):
    """When a command is sent. The value: in words."""

    ALWAYS = "always"
    TTL_REFRESH = "--ttl-refresh"
    DATABASE = "another database than 0"
    CLUSTER = "a Cluster"
    SENTINEL = "Sentinel"
    ROUTERS = "routers"
    TENANTS = "--tenant-bytes"
    WARM = "--warm-bytes"


class Command(NamedTuple):
    """name: as ACL rules write it. words: an example that changes nothing but `KEY`.

    without: what happens if it is refused. is_vital: nothing is cached without it.
    """

    name: str
    words: tuple[str | int, ...]
    without: str
    use: Use = Use.ALWAYS
    is_vital: bool = False

    @property
    def shown(self) -> str:
        return self.name.upper().replace("|", " ")


# In the order in which they can be tried: what SET writes, UNLINK removes.
COMMANDS: Final = (
    Command("ping", ("PING",), "a server that hangs is noticed late"),
    Command("select", ("SELECT", DATABASE), "agents cannot connect", Use.DATABASE, True),
    Command("cluster|slots", ("CLUSTER", "SLOTS"), "no server is found", Use.CLUSTER, True),
    Command(
        "cluster|info", ("CLUSTER", "INFO"),
        "a node that is cut off from its cluster is noticed later", Use.CLUSTER,
    ),
    Command(
        "asking", ("ASKING",), "chunks in a slot that is moving are missed", Use.CLUSTER
    ),
    Command("set", ("SET", KEY, "", "EX", _EXPIRES_S), "nothing is stored", is_vital=True),
    Command("get", ("GET", KEY), "nothing is loaded", is_vital=True),
    Command("exists", ("EXISTS", KEY), "nothing is found", is_vital=True),
    Command("touch", ("TOUCH", KEY), "what host pools serve is evicted"),
    Command(
        "getrange", ("GETRANGE", KEY, 0, 0),
        "a removal that is tried again may remove what was stored since, and `why --layouts` knows "
        "only the engines of its own agent",
    ),
    Command(
        "expire", ("EXPIRE", KEY, _EXPIRES_S), "what host pools serve expires", Use.TTL_REFRESH
    ),
    Command(
        "getex", ("GETEX", KEY, "EX", _EXPIRES_S), "nothing is loaded", Use.TTL_REFRESH, True
    ),
    Command(
        "incrby", ("INCRBY", KEY, 0), "no limit of a tenant is kept", Use.TENANTS
    ),
    Command(
        "scan", ("SCAN", "0", "MATCH", KEY, "COUNT", 1),
        "chunks of an old epoch stay, and `why --layouts` knows only the engines of its own agent",
    ),
    Command(
        "unlink", ("UNLINK", KEY),
        "chunks that canaries have found wrong stay, and those of old epochs and what the library "
        "removes",
        is_vital=True,
    ),
    Command(
        "subscribe", ("SUBSCRIBE", CHANNEL),
        "routers are not told what Redis evicts and expires", Use.ROUTERS,
    ),
    Command("object|freq", ("OBJECT", "FREQ", KEY), "new host pools are not filled", Use.WARM),
    Command(
        "object|idletime", ("OBJECT", "IDLETIME", KEY), "new host pools are not filled", Use.WARM
    ),
    Command(
        "sentinel|get-master-addr-by-name", ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE),
        "no server is found", Use.SENTINEL, True,
    ),
    Command(
        "sentinel|master", ("SENTINEL", "MASTER", SERVICE),
        "a Sentinel with an old configuration is noticed later", Use.SENTINEL,
    ),
)  # fmt: skip
# What redis-py needs beside these to find the servers. (Elsewhere it needs nothing.)
TOOLS: Final = {Use.SENTINEL: ("sentinel|masters",)}


def needed(uses: Collection[Use]) -> tuple[Command, ...]:
    """Those that are always sent, and those for these uses."""
    return tuple(each for each in COMMANDS if each.use is Use.ALWAYS or each.use in uses)


def shown(use: Use) -> str:
    """The commands of one use, in words."""
    return ", ".join(each.shown for each in COMMANDS if each.use is use)


def removal_channels(db: int) -> list[str]:
    """Where a database tells that keys are gone."""
    return [f"__keyevent@{db}__:{event}" for event in ("evicted", "expired", "del")]
