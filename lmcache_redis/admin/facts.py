# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of a server: INFO, and CONFIG GET. What is refused is None."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_redis.admin.server import Command, Primary, PrimaryServers
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.errors import RedisError, RedisNotAllowed, RedisRedirect, RedisTimeout
from lmcache_redis.resp.net.endpoint import Endpoint, Transport

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Need:
    """The KV that prefill produces: bytes per token, and tokens per second of all engines.

    prompt_tokens: of a usual prompt. memory_per_token: in a server, headers included, and
    loaded_per_token, of a hit; 0: as kv_bytes_per_token. of: whose these are. is_known: they are
    not a guess.
    """

    kv_bytes_per_token: int = 128 << 10
    prefill_tokens_per_s: float = 8000.0
    prompt_tokens: int = 8192
    memory_per_token: float = 0.0
    loaded_per_token: float = 0.0
    of: str = "a model of 8B parameters"
    is_known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one server; None: unknown. Sizes in bytes.

    local: on this machine. private: every address is a private one. nodes: how many servers share
    the keys. as_cluster: named as a Redis Cluster, so that agents send each key to its node.
    all_here: key prefixes and models whose braces put every chunk into one slot of this server.
    normal_buffer: hard limit, soft limit and soft seconds of client-output-buffer-limit.
    clients_memory_bytes: maxmemory-clients, 0: no limit. save: the
    schedule as configured, "" for none. unseen: what was refused, in words. pool_bytes: of this
    node's agent. oldest_idle_s: of a sample of chunks, the longest time without a use.
    """

    where: str = ""
    transport: Transport = Transport.TCP
    local: bool = False
    private: bool = True
    has_password: bool = False
    certificate_checked: bool = True
    nodes: int = 1
    as_cluster: bool = False
    all_here: tuple[str, ...] = ()
    product: str = "redis"
    version: tuple[int, ...] | None = None
    role: str | None = None
    cluster_enabled: bool | None = None
    machine_bytes: int | None = None
    maxmemory_bytes: int | None = None
    policy: str | None = None
    evicted_keys: int | None = None
    save: str | None = None
    save_failed: bool | None = None
    append_only: bool | None = None
    io_threads: int | None = None
    normal_buffer: tuple[int, int, int] | None = None
    clients_memory_bytes: int | None = None
    unseen: tuple[str, ...] = ()
    ping_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    bandwidth_refused: str = ""
    load_per_core: float = 0.0
    need: Need = Need()
    pool_bytes: int | None = None
    oldest_idle_s: float | None = None


def gather(server: PrimaryServers, node: Primary, prefix: bytes = b"", **known: Any) -> Facts:
    """The facts of one node, beside those that are known. prefix: of keys. Raises RedisTimeout."""
    unseen: list[str] = []
    (info,) = _asked(node, ("INFO",))
    if not isinstance(info, dict):
        unseen.append("INFO is refused: memory, persistence, version and connections")
    # One CONFIG GET per setting: before Redis 7 the command takes only one.
    settings = ("save", "io-threads", "client-output-buffer-limit", "maxmemory-clients")
    replies = _asked(node, *[("CONFIG GET", name) for name in settings])
    if not all(isinstance(reply, dict) for reply in replies):
        unseen.append("CONFIG is refused: save, client-output-buffer-limit, io-threads")
    info = info if isinstance(info, dict) else {}
    # Some proxies say so for themselves (Envoy), and are no node.
    if info.get("cluster_enabled") and not server.is_cluster:
        info["cluster_enabled"] = _is_of_a_cluster(node, prefix)
    endpoint = node.endpoint
    local, private = _place(endpoint)
    return facts_of(
        info,
        dict(ChainMap(*(reply for reply in replies if isinstance(reply, dict)))),
        where=endpoint.where,
        transport=endpoint.transport,
        local=local,
        private=private,
        has_password=endpoint.credentials is not None,
        certificate_checked=dict(endpoint.tls).get("ssl_cert_reqs", "required") == "required",
        nodes=len(server.nodes),
        as_cluster=server.is_cluster,
        unseen=tuple(unseen),
        **known,
    )


def names_in_one_slot(prefix: bytes, models: Iterable[str]) -> list[bytes]:
    """The key prefix, or else the models, whose own braces come before those of a hash. Pure."""
    names = [prefix] if b"{" in prefix else [model.encode() for model in sorted(models)]
    return [each for each in names if each.partition(b"{")[2].find(b"}") > 0]


def _asked(node: Primary, *commands: Command) -> Sequence[Any]:
    """The replies. Some servers close the connection instead of an error reply (twemproxy): whether
    they are there at all, later questions tell. Raises RedisTimeout."""
    try:
        return node.ask_all(commands)
    except RedisTimeout:
        raise
    except RedisError as error:
        return [error] * len(commands)


def _is_of_a_cluster(node: Primary, prefix: bytes) -> bool:
    """Whether it has slots, or names who has those of a key. Raises RedisTimeout."""
    # By its first word, redis-py takes the reply as it is.
    (slots,) = _asked(node, ("CLUSTER", "SLOTS"))
    if not isinstance(slots, RedisNotAllowed):
        return isinstance(slots, list)
    keys = [b"%b%bdoctor:%d" % (prefix, KEY_MAGIC, number) for number in range(50)]
    replies = _asked(node, *[("EXISTS", key) for key in keys])
    return any(isinstance(reply, RedisRedirect) for reply in replies)


def facts_of(info: Mapping[str, Any], settings: Mapping[str, str], **known: Any) -> Facts:
    """Facts from the replies of INFO and CONFIG GET, either of which may be empty. Pure."""
    save_status = info.get("rdb_last_bgsave_status")
    valkey = info.get("valkey_version")
    version = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(valkey or info.get("redis_version")))
    limits = str(settings.get("client-output-buffer-limit"))
    normal = re.search(r"\bnormal (\d+) (\d+) (\d+)", limits)
    maxmemory_bytes = _told(info, "maxmemory", int)
    return Facts(
        product="valkey" if valkey else "redis",
        version=tuple(int(part) for part in version.groups() if part) if version else None,
        role=_told(info, "role", str),
        cluster_enabled=_told(info, "cluster_enabled", bool),
        machine_bytes=_told(info, "total_system_memory", int),
        maxmemory_bytes=maxmemory_bytes,
        policy=_told(info, "maxmemory_policy", str),
        evicted_keys=_told(info, "evicted_keys", int),
        save=_told(settings, "save", str),
        save_failed=None if save_status is None else save_status != "ok",
        append_only=_told(info, "aof_enabled", bool),
        io_threads=_told(settings, "io-threads", int),
        normal_buffer=(int(normal[1]), int(normal[2]), int(normal[3])) if normal else None,
        clients_memory_bytes=_limit_of(settings.get("maxmemory-clients"), maxmemory_bytes),
        **known,
    )


def _limit_of(value: str | None, maxmemory_bytes: int | None) -> int | None:
    """A limit in bytes, or as a share of maxmemory."""
    match = re.fullmatch(r"(\d+)(%?)", str(value))
    if match is None or not match[2]:
        return None if match is None else int(match[1])
    return None if maxmemory_bytes is None else maxmemory_bytes * int(match[1]) // 100


def _told(fields: Mapping[str, Any], name: str, kind: Callable[[Any], _T]) -> _T | None:
    """A field as redis-py reads it; None if it is absent or of another type."""
    try:
        return kind(fields[name])
    except (LookupError, TypeError, ValueError):
        return None


def _place(endpoint: Endpoint) -> tuple[bool, bool]:
    """Whether the server is on this machine, and whether it has only private addresses."""
    if endpoint.transport is Transport.UNIX:
        return True, True
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        return all(a.is_loopback for a in addresses), all(a.is_private for a in addresses)
    return False, False
