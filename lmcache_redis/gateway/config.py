"""The settings of `lmcache-redis gateway`, in the manner of `lmcache_redis.config`.

The command's options are made from the fields, so they cannot disagree with them.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.config import MIN_SLOT_BYTES, machine_share, option_name
from lmcache_redis.errors import ConfigError
from lmcache_redis.lm_wire import MAX_WIRE_LENGTH

DEFAULT_LISTEN = "lm://127.0.0.1:65432"
_LISTEN = re.compile(r"lm://(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+|localhost)):(0|[1-9][0-9]{0,4})")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _setting(
    help_text: str, default: Any = dataclasses.MISSING, *, shown: str = "", **more: Any
) -> Any:
    meta = {"help": help_text, "shown": shown, "size": more.pop("size", False)}
    if default is not dataclasses.MISSING:
        more["default"] = default
    return field(metadata=meta, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """All settings of a gateway. Raises ``ConfigError`` for impossible values."""

    listen: str = _setting(
        "where to listen: lm://ADDRESS:PORT, an IPv6 address in brackets; the protocol has no "
        "password, so beyond loopback it takes --allowed-peers, --tls-client-ca or --allow-anyone",
        DEFAULT_LISTEN,
    )
    redis_url: str | None = _setting(
        "where Redis is: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://; "
        "without one chunks live in this process and on its disk only",
        None,
        repr=False,  # it may hold a password
    )
    redis_username: str | None = _setting("ACL user, if not in the URL", None)
    redis_password: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "password, if not in the URL; ..._PASSWORD_FILE names a file that holds it",
            "environment_only": "LMCACHE_REDIS_PASSWORD",
            "shown": "",
        },
    )
    key_prefix: bytes = _setting("put before every key, to share a server with others", b"")
    memory_bytes: int = _setting(
        "chunks kept in this process, in front of disk and Redis; 0: none",
        default_factory=lambda: machine_share(4 << 30),
        shown="4GiB, at most a quarter of the machine's memory",
        size=True,
    )
    disk_path: str | None = _setting(
        "a directory of this node that keeps chunks as well, and across restarts", None
    )
    disk_size: int = _setting("most that files in --disk-path may take", 64 << 30, size=True)
    buffer_bytes: int = _setting(
        "memory of payloads on their way, a hard limit",
        default_factory=lambda: machine_share(1 << 30),
        shown="1GiB, at most a quarter of the machine's memory",
        size=True,
    )
    slot_bytes: int = _setting(
        "piece of that memory; a payload takes whole ones", 256 << 10, size=True
    )
    max_payload_bytes: int | None = _setting(
        "largest chunk; a client that sends a larger one is disconnected",
        None,
        shown="a quarter of --buffer-bytes",
        size=True,
    )
    max_connections: int = _setting("clients at a time; more are turned away", 1024)
    threads: int = _setting("calls to memory, disk and Redis at a time", 16)
    payload_threads: int = _setting(
        "threads that move payloads of 256 KiB and more between sockets and memory",
        default_factory=lambda: min(max(2, (os.cpu_count() or 1) // 2), 8),
        shown="half as many as CPUs, 2 to 8",
    )
    stall_timeout_s: float = _setting(
        "within it a message under way must be done or further by 256 KiB and an eighth of its "
        "length, or the client is disconnected; within a fifth of it while somebody waits for "
        "room in the buffers",
        10.0,
    )
    idle_timeout_s: float = _setting(
        "a client that begins no request for so long is disconnected; 0: never", 86_400.0
    )
    shutdown_deadline_s: float = _setting("how long requests may go on once the gateway stops", 5.0)
    tls_cert: str | None = _setting(
        "PEM file of the server's certificate chain; turns TLS on", None
    )
    tls_key: str | None = _setting("PEM file of its private key, if that is another file", None)
    tls_client_ca: str | None = _setting(
        "PEM file of the authorities one of which must have signed a client's certificate", None
    )
    allowed_peers: str | None = _setting(
        "networks that may connect, separated by commas: 10.0.0.0/8,fd00::/8,192.168.1.7",
        None,
        shown="all",
    )
    allow_anyone: bool = _setting(
        "listen beyond loopback though whoever reaches the address can read and replace chunks",
        False,
    )
    log_level: str = _setting("debug, info, warning or error", "info")

    def __post_init__(self) -> None:
        _between("buffer_bytes", self.buffer_bytes, MIN_SLOT_BYTES, 1 << 50)
        most_slot_bytes = min(self.buffer_bytes, 512 << 20) // MIN_SLOT_BYTES * MIN_SLOT_BYTES
        _between("slot_bytes", self.slot_bytes, MIN_SLOT_BYTES, most_slot_bytes)
        _between("memory_bytes", self.memory_bytes, 0, 1 << 50)
        _between("disk_size", self.disk_size, 1 << 20, 1 << 60)
        _between("max_payload_bytes", self.payload_limit_bytes, 1, MAX_WIRE_LENGTH)
        if self.payload_limit_bytes > self.usable_buffer_bytes:
            raise ConfigError(
                f"--max-payload-bytes is {self.payload_limit_bytes}, more than the "
                f"{self.usable_buffer_bytes} bytes of slots in --buffer-bytes: change one of them"
            )
        _between("max_connections", self.max_connections, 1, 1 << 16)
        _between("threads", self.threads, 1, 256)
        _between("payload_threads", self.payload_threads, 1, 64)
        _between("stall_timeout_s", self.stall_timeout_s, 0.1, 3600)
        _between("idle_timeout_s", self.idle_timeout_s, 0, 10**9)
        _between("shutdown_deadline_s", self.shutdown_deadline_s, 0, 600)
        if not (self.memory_bytes or self.disk_path or self.redis_url):
            raise ConfigError(
                "there is nowhere to keep chunks: give --redis-url, --memory-bytes or --disk-path"
            )
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ConfigError("--tls-key and --tls-client-ca need --tls-cert: give that as well")
        is_loopback = ipaddress.ip_address(parse_listen(self.listen)[0]).is_loopback
        restricted = parse_networks(self.allowed_peers) or self.tls_client_ca
        if not (is_loopback or restricted or self.allow_anyone):
            raise ConfigError(
                f"--listen {self.listen} is beyond loopback, where whoever reaches it can read and "
                "replace chunks: give --allowed-peers or --tls-client-ca, or --allow-anyone if "
                "that is meant"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"--log-level is {self.log_level!r}: choose one of debug, info, warning, error"
            )

    @property
    def usable_buffer_bytes(self) -> int:
        """What slots hold together."""
        stride = -(-self.slot_bytes // MIN_SLOT_BYTES) * MIN_SLOT_BYTES
        return self.buffer_bytes // stride * self.slot_bytes

    @property
    def payload_limit_bytes(self) -> int:
        """``max_payload_bytes``, resolved."""
        if self.max_payload_bytes is not None:
            return self.max_payload_bytes
        return min(max(self.buffer_bytes // 4, self.slot_bytes), MAX_WIRE_LENGTH)


def parse_listen(text: str) -> tuple[str, int]:
    """Address and port of ``lm://ADDRESS:PORT``; port 0 is any free one."""
    match = _LISTEN.fullmatch(text) if isinstance(text, str) else None
    host = match and (match.group(1) or match.group(2))
    if match is None or host is None or int(match.group(3)) > 65_535:
        raise ConfigError(f"--listen is {text!r}: write lm://ADDRESS:PORT, as {DEFAULT_LISTEN}")
    if host == "localhost":
        host = "127.0.0.1"  # where LMCache's client looks: it speaks IPv4 only
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"--listen is {text!r}: {error}; write {DEFAULT_LISTEN}") from error
    if (address.version == 6) != (match.group(1) is not None):
        raise ConfigError(f"--listen is {text!r}: brackets are for IPv6 addresses, and only those")
    return str(address), int(match.group(3))


def parse_networks(text: str | None) -> tuple[Network, ...] | None:
    """The networks of ``allowed_peers``; None is no restriction."""
    if text is None:
        return None
    try:
        return tuple(ipaddress.ip_network(each.strip()) for each in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--allowed-peers is {text!r} ({error}): write networks as 10.0.0.0/8,fd00::/8"
        ) from error


def _between(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{option_name(name)} is {value!r}: set it to {least:g} to {most:g}")
