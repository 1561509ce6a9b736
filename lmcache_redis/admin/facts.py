"""What can be seen of a server: INFO, CONFIG where it is allowed, and /sys where it is here.

Managed services forbid CONFIG, and a user may lack INFO too: what is refused is None in
`Facts` and named in `Facts.unseen`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_redis.admin.findings import Facts, Need
from lmcache_redis.admin.server import Node, Server
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.endpoint import Endpoint, Transport

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SETTINGS = (
    "maxmemory",
    "maxmemory-policy",
    "save",
    "appendonly",
    "stop-writes-on-bgsave-error",
    "client-output-buffer-limit",
    "proto-max-bulk-len",
    "client-query-buffer-limit",
    "maxclients",
    "io-threads",
    "disable-thp",
)
# Those of which INFO says nothing.
_ONLY_CONFIG = "save, client-output-buffer-limit, io-threads, disable-thp"

Info = Mapping[str, Any]
Settings = Mapping[str, str]


def gather(server: Server, node: Node, need: Need, huge_pages: Path = HUGE_PAGES) -> Facts:
    """The facts of one node, nothing measured. Raises RedisError where the connection fails."""
    unseen: list[str] = []
    info = _info(node, unseen)
    settings = _settings(node, unseen)
    endpoint = node.endpoint
    local, private = _place(endpoint)
    return facts_of(
        info,
        settings,
        where=node.where,
        transport=endpoint.transport,
        local=local,
        private=private,
        has_password=endpoint.password is not None,
        certificate_checked=dict(endpoint.tls).get("ssl_cert_reqs", "required") == "required",
        nodes=len(server.nodes),
        as_cluster=server.is_cluster,
        cores=os.cpu_count() if local else None,
        huge_pages=_huge_pages(huge_pages) if local else None,
        unseen=tuple(unseen),
        need=need,
    )


def facts_of(info: Info, settings: Settings, **known: Any) -> Facts:
    """Facts from the replies of INFO and CONFIG GET, either of which may be empty. Pure."""
    valkey = info.get("valkey_version")
    save_seconds = _number(info, "rdb_last_bgsave_time_sec")
    saves = _number(info, "rdb_saves")
    return Facts(
        product="valkey" if valkey else "redis",
        version=_version(valkey or info.get("redis_version")),
        role=_text(info, "role"),
        cluster_enabled=_flag(info, "cluster_enabled"),
        machine_bytes=_number(info, "total_system_memory"),
        used_bytes=_number(info, "used_memory"),
        maxmemory_bytes=_first(_size(settings, "maxmemory"), _number(info, "maxmemory")),
        policy=settings.get("maxmemory-policy") or _text(info, "maxmemory_policy"),
        fragmentation=_float(info, "mem_fragmentation_ratio"),
        evicted_keys=_number(info, "evicted_keys"),
        save=settings.get("save"),
        saved=None if save_seconds is None else save_seconds >= 0 or bool(saves),
        save_failed=info["rdb_last_bgsave_status"] != "ok"
        if "rdb_last_bgsave_status" in info
        else None,
        stops_writes=_yes(settings, "stop-writes-on-bgsave-error"),
        append_only=_first(_yes(settings, "appendonly"), _flag(info, "aof_enabled")),
        replicas=_number(info, "connected_slaves"),
        fork_us=_number(info, "latest_fork_usec"),
        io_threads=_first(_size(settings, "io-threads"), _active_threads(info)),
        normal_buffer=_normal_buffer(settings.get("client-output-buffer-limit")),
        bulk_limit_bytes=_size(settings, "proto-max-bulk-len"),
        query_buffer_bytes=_size(settings, "client-query-buffer-limit"),
        clients=_number(info, "connected_clients"),
        max_clients=_first(_size(settings, "maxclients"), _number(info, "maxclients")),
        disable_huge_pages=_yes(settings, "disable-thp"),
        **known,
    )


def _info(node: Node, unseen: list[str]) -> Info:
    reply = node.ask_all([("INFO",)])[0]
    if isinstance(reply, bytes):
        return info_of(reply)
    unseen.append("INFO is refused: memory, persistence, version and connections")
    return {}


def info_of(reply: bytes) -> Info:
    """What INFO says, by name. Pure."""
    lines = [line.partition(":") for line in reply.decode("utf-8", "replace").splitlines()]
    return {name: value for name, colon, value in lines if colon}


def _settings(node: Node, unseen: list[str]) -> Settings:
    """One CONFIG GET for each: several in one are not understood before Redis 7."""
    replies = node.ask_all([("CONFIG", "GET", name) for name in SETTINGS])
    settings: dict[str, str] = {}
    for name, reply in zip(SETTINGS, replies, strict=True):
        if isinstance(reply, list) and len(reply) == 2:
            settings[name] = _decoded(reply[1])
    if any(isinstance(reply, RedisError) for reply in replies):
        unseen.append(f"CONFIG is refused: {_ONLY_CONFIG}")
    return settings


def _place(endpoint: Endpoint) -> tuple[bool, bool]:
    """Whether the server is on this machine, and whether its address is a private one."""
    if endpoint.transport is Transport.UNIX:
        return True, True
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        return all(a.is_loopback for a in addresses), all(a.is_private for a in addresses)
    return False, False


def _huge_pages(path: Path) -> str | None:
    """The word in brackets: always, madvise or never."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return match.group(1) if match else None


def _active_threads(info: Info) -> int | None:
    """INFO tells whether there are threads, not how many: 2 stands for some."""
    active = _flag(info, "io_threads_active")
    return 2 if active else None


def _normal_buffer(text: str | None) -> tuple[int, int, int] | None:
    match = re.search(r"\bnormal (\d+) (\d+) (\d+)", text or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _version(text: object) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text or ""))
    return tuple(int(part) for part in match.groups() if part) if match else None


def _decoded(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _text(info: Info, name: str) -> str | None:
    return str(info[name]) if name in info else None


def _number(info: Info, name: str) -> int | None:
    value = _float(info, name)
    return None if value is None else int(value)


def _float(info: Info, name: str) -> float | None:
    try:
        return float(info[name])
    except (KeyError, ValueError):
        return None


def _flag(info: Info, name: str) -> bool | None:
    value = _number(info, name)
    return None if value is None else bool(value)


def _size(settings: Settings, name: str) -> int | None:
    value = settings.get(name, "")
    return int(value) if value.isdigit() else None


def _yes(settings: Settings, name: str) -> bool | None:
    value = settings.get(name)
    return None if value is None else value == "yes"


def _first(preferred: Any, other: Any) -> Any:
    return other if preferred is None else preferred
