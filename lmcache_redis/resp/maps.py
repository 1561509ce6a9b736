# SPDX-License-Identifier: Apache-2.0
"""Which servers there are, and which slots each has, as one Sentinel or node says. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from lmcache_redis.errors import RedisUnavailable
from lmcache_redis.resp.net.endpoint import Endpoint
from lmcache_redis.resp.options import Deployment

SLOTS = 16384
# More nodes than this are not recommended in a cluster; each costs threads and connections.
_MOST_SERVERS = 1000
# What a Sentinel says of a master that it would not name to anybody if it knew another.
_IN_DOUBT = {"s_down", "o_down", "disconnected"}


class ServerMap(NamedTuple):
    """The data servers, and in a cluster the slots of each.

    ranges: (first slot, last slot, number of the server); None: the one server has every key.
    """

    servers: tuple[Endpoint, ...]
    ranges: tuple[tuple[int, int, int], ...] | None = None

    @property
    def unserved(self) -> int:
        """How many slots no server has."""
        if self.ranges is None:
            return 0
        return max(0, SLOTS - sum(last - first + 1 for first, last, _ in self.ranges))


class Answer(NamedTuple):
    """The map as one source has it.

    epoch: of two maps the one with the greater is newer; None: not told. doubt: why the source
    itself is not sure; empty if it is.
    """

    map: ServerMap
    epoch: int | None = None
    doubt: str = ""

    @property
    def shown(self) -> str:
        """The map in a line, for the log."""
        servers = self.map.servers
        names = ", ".join(server.where for server in servers[:8])
        more = f" and {len(servers) - 8} more" if len(servers) > 8 else ""
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return f"{names}{more}{epoch}{self.doubt and ', '}{self.doubt}"


def read_slots(deployment: Deployment, asked: Endpoint, rows: list[list[Any]]) -> ServerMap:
    """The reply to CLUSTER SLOTS. Equal maps are equal, whatever the order of the rows.

    Rows are [first slot, last slot, [host, port, id, ...] of the master, replicas...]. Without a
    host it is the host that was asked; ? is a host name that is not set, and port 0 a port that is
    not open (https://redis.io/docs/latest/commands/cluster-slots/). Raises RedisUnavailable for a
    map that names no server; TypeError, ValueError and IndexError for a malformed one.
    """
    numbers: dict[tuple[str, int], int] = {}
    ranges: list[tuple[int, int, int]] = []
    for first, last, master, *_ in sorted(rows, key=lambda row: int(row[0])):
        if not 0 <= first <= last < SLOTS:
            raise ValueError
        host, port = text_of(master[0] or b"") or asked.host, int(master[1])
        if host != "?" and 0 < port < 1 << 16:
            ranges.append((first, last, numbers.setdefault((host, port), len(numbers))))
    if len(numbers) > _MOST_SERVERS:
        names = f"names {len(numbers)} servers, more than {_MOST_SERVERS}"
        raise RedisUnavailable(f"the cluster at {asked.where} {names}")
    if not ranges:
        missing = "does not name its servers (?)" if rows else "has no slots assigned yet"
        raise RedisUnavailable(f"the cluster at {asked.where} {missing}")
    servers = tuple(deployment.at(host, port) for host, port in numbers)
    return ServerMap(servers, tuple(ranges))


def judge_cluster(found: ServerMap, info: bytes | None) -> Answer:
    """info: the reply to CLUSTER INFO, if it was answered.

    A node that is cut off from its cluster says that it fails, and does not know of new epochs.
    """
    lines = text_of(info or b"").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    state = fields.get("cluster_state", "ok")
    doubt = "" if state == "ok" else f"cluster_state {state}"
    return Answer(found, _number(fields.get("cluster_current_epoch")), doubt)


def judge_master(found: ServerMap, flat: list[Any] | None) -> Answer:
    """flat: the reply to SENTINEL MASTER, names and values in turn, if it was answered.

    A Sentinel with an old configuration does not reach its master, or finds a replica there; or it
    does not know as many Sentinels as it takes.
    """
    words = [text_of(word) for word in flat or () if isinstance(word, bytes)]
    fields = dict(zip(words[::2], words[1::2], strict=False))
    epoch = _number(fields.get("config-epoch"))
    (server,) = found.servers
    if (fields.get("ip"), fields.get("port")) != (server.host, str(server.port)):
        # A failover is under way: the rest is about the master that it leaves.
        return Answer(found, epoch)
    doubts = sorted(_IN_DOUBT & set(fields.get("flags", "").split(",")))
    if fields.get("role-reported", "master") != "master":
        doubts.append(f"which is a {fields['role-reported']}")
    others, quorum = _number(fields.get("num-other-sentinels")), _number(fields.get("quorum"))
    if others is not None and quorum is not None and others + 1 < quorum:
        doubts.append(f"{others + 1} of {quorum} Sentinels")
    return Answer(found, epoch, ", ".join(doubts))


def text_of(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else None
