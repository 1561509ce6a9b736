"""What the doctor sees of a server (`Facts`), and what it says about it (`Finding`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache_redis.admin.sizes import gigabytes, shown_bytes
from lmcache_redis.resp.endpoint import Transport


class Severity(enum.IntEnum):
    """How much it matters; CRITICAL and WARNING make the doctor's exit status 1."""

    CRITICAL = 0
    WARNING = 1
    HINT = 2
    OK = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one server: what was seen, why it matters here, how to change it."""

    severity: Severity
    topic: str
    seen: str
    why: str = ""
    change: tuple[str, ...] = ()
    where: str = ""


def setting(name: str, value: str) -> tuple[str, str]:
    """How to change a setting: the command for now, and the line that a restart reads."""
    line = value.strip('"') if " " in value else value
    return f"CONFIG SET {name} {value}", f"redis.conf: {name} {line}"


@dataclass(frozen=True, slots=True)
class Need:
    """What prefill produces: bytes of KV a token, and tokens a second of all engines here."""

    kv_bytes_per_token: int = 128 << 10
    prefill_tokens_per_s: float = 8000.0

    @property
    def bytes_per_s(self) -> float:
        return self.kv_bytes_per_token * self.prefill_tokens_per_s

    @property
    def sum(self) -> str:
        return (
            f"{shown_bytes(self.kv_bytes_per_token)} of KV a token x "
            f"{self.prefill_tokens_per_s:,.0f} tokens/s of prefill = "
            f"{gigabytes(self.bytes_per_s)}/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of one server; None where it could not be. Sizes in bytes.

    local: on this machine. private: not reachable by a public address. nodes: how many
    servers share the keys. as_cluster: agents ask each of them for its own slots.
    normal_buffer: hard limit, soft limit, soft seconds of client-output-buffer-limit. save:
    the schedule as configured, "" for none. saved: whether a background save was seen since
    the start. unseen: what was refused, in words.
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
    role: str | None = None
    cluster_enabled: bool | None = None
    machine_bytes: int | None = None
    used_bytes: int | None = None
    maxmemory_bytes: int | None = None
    policy: str | None = None
    fragmentation: float | None = None
    evicted_keys: int | None = None
    save: str | None = None
    saved: bool | None = None
    save_failed: bool | None = None
    stops_writes: bool | None = None
    append_only: bool | None = None
    replicas: int | None = None
    fork_us: int | None = None
    io_threads: int | None = None
    cores: int | None = None
    normal_buffer: tuple[int, int, int] | None = None
    bulk_limit_bytes: int | None = None
    query_buffer_bytes: int | None = None
    clients: int | None = None
    max_clients: int | None = None
    huge_pages: str | None = None
    disable_huge_pages: bool | None = None
    unseen: tuple[str, ...] = ()
    ping_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    bandwidth_refused: str = ""
    need: Need = Need()
