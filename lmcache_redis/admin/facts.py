"""Reads the facts of a server: INFO, and CONFIG GET. What is refused is None."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import socket
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.admin.server import Primary, PrimaryServers
from lmcache_redis.errors import RedisError
from lmcache_redis.resp.net.endpoint import Endpoint, Transport


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


def _from(info: str = "", setting: str = "") -> Any:
    """A fact that the server reports: CONFIG GET of ``setting``, else this field of INFO."""
    return field(default=None, metadata={"info": info, "setting": setting})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one server; None: unknown. Sizes in bytes.

    local: on this machine. private: every address is a private one. nodes: how many servers share
    the keys. as_cluster: named as a Redis Cluster, so that agents send each key to its node.
    normal_buffer: hard limit, soft limit and soft seconds of client-output-buffer-limit. save: the
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
    product: str = "redis"
    version: tuple[int, ...] | None = None
    role: str | None = _from("role")
    cluster_enabled: bool | None = _from("cluster_enabled")
    machine_bytes: int | None = _from("total_system_memory")
    maxmemory_bytes: int | None = _from("maxmemory", "maxmemory")
    policy: str | None = _from("maxmemory_policy", "maxmemory-policy")
    evicted_keys: int | None = _from("evicted_keys")
    save: str | None = _from(setting="save")
    save_failed: bool | None = None
    append_only: bool | None = _from("aof_enabled", "appendonly")
    io_threads: int | None = _from(setting="io-threads")
    normal_buffer: tuple[int, int, int] | None = _from(setting="client-output-buffer-limit")
    unseen: tuple[str, ...] = ()
    ping_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    bandwidth_refused: str = ""
    need: Need = Need()
    pool_bytes: int | None = None
    oldest_idle_s: float | None = None


_STATED = [f for f in dataclasses.fields(Facts) if f.metadata]
SETTINGS = [f.metadata["setting"] for f in _STATED if f.metadata["setting"]]


def gather(server: PrimaryServers, node: Primary, **known: Any) -> Facts:
    """The facts of one node, beside those that are known. Raises RedisError if the connection
    fails."""
    unseen: list[str] = []
    (info,) = node.ask_all([("INFO",)])
    if isinstance(info, RedisError):
        unseen.append("INFO is refused: memory, persistence, version and connections")
    # One CONFIG GET per setting: before Redis 7 the command takes only one.
    replies = node.ask_all([("CONFIG GET", name) for name in SETTINGS])
    if any(isinstance(reply, RedisError) for reply in replies):
        unseen.append("CONFIG is refused: save, client-output-buffer-limit, io-threads")
    endpoint = node.endpoint
    local, private = _place(endpoint)
    return facts_of(
        info if isinstance(info, dict) else {},
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


def facts_of(info: Mapping[str, Any], settings: Mapping[str, str], **known: Any) -> Facts:
    """Facts from the replies of INFO and CONFIG GET, either of which may be empty. Pure."""
    stated = {
        f.name: value
        for f in _STATED
        for text in (info.get(f.metadata["info"]), settings.get(f.metadata["setting"]))
        if (value := _read(str(f.type), text)) is not None
    }
    save_status = info.get("rdb_last_bgsave_status")
    valkey = info.get("valkey_version")
    version = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(valkey or info.get("redis_version")))
    return Facts(
        product="valkey" if valkey else "redis",
        version=tuple(int(part) for part in version.groups() if part) if version else None,
        save_failed=None if save_status is None else save_status != "ok",
        **stated,
        **known,
    )


def _normal_buffer(text: str) -> tuple[int, int, int] | None:
    match = re.search(r"\bnormal (\d+) (\d+) (\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


_READERS: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": lambda text: int(float(text)),
    "bool": lambda text: text == "yes" or (text != "no" and float(text) != 0),
    "tuple[int, int, int]": _normal_buffer,
}


def _read(kind: str, text: Any) -> Any:
    """The text as a value of type ``kind``; None if there is no text, or it is not of that type."""
    try:
        return None if text is None else _READERS[kind.removesuffix(" | None")](text)
    except ValueError:
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
