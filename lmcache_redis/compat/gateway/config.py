# SPDX-License-Identifier: Apache-2.0
"""The settings of `lmcache-redis gateway`, in the manner of `lmcache_redis.config`.

The command's options are generated from the fields.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from lmcache_redis.compat.lm_wire import MAX_WIRE_LENGTH
from lmcache_redis.config import MIN_SLOT_BYTES, TierSettings, machine_share, parse_address
from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import setting

DEFAULT_LISTEN = "lm://127.0.0.1:65432"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(TierSettings):
    """All settings of a gateway. Raises ``ConfigError`` for invalid values."""

    listen: str = setting(
        "address to listen on: lm://ADDRESS:PORT, an IPv6 address in brackets; the protocol has no "
        "password, so beyond loopback it needs --allowed-peers, --tls-client-ca or --allow-anyone",
        DEFAULT_LISTEN,
        form="lm://ADDRESS:PORT",
    )
    memory_bytes: int = setting(
        "memory tier, in front of disk and Redis; 0: none",
        lambda: machine_share(4 << 30),
        shown="4GiB, at most a quarter of the machine's or container's memory",
        between=(0, 1 << 50),
    )
    buffer_bytes: int = setting(
        "payload in flight: PUTs until all tiers have answered, GETs until they are sent; a chunk "
        "may have a quarter of it",
        lambda: machine_share(1 << 30),
        shown="1GiB, at most a quarter of the machine's or container's memory",
        between=(MIN_SLOT_BYTES, 1 << 50),
    )
    max_connections: int = setting(
        "maximum number of clients; lower if the limit of open files is", 1024, (1, 1 << 16)
    )
    tls_cert: str | None = setting(
        "PEM file of the server's certificate chain; turns TLS on", None, form="FILE"
    )
    tls_key: str | None = setting("PEM file of its private key, if separate", None, form="FILE")
    tls_client_ca: str | None = setting(
        "PEM file of the authorities that may sign client certificates; clients then need one",
        None,
        form="FILE",
    )
    allowed_peers: str | None = setting(
        "networks that may connect, separated by commas: 10.0.0.0/8,fd00::/8,192.168.1.7",
        None,
        shown="all",
    )
    allow_anyone: bool = setting(
        "listen beyond loopback although any client can read and replace chunks", False
    )

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        if not (self.memory_bytes or self.disk_path or self.redis_url):
            raise ConfigError(
                "there is no tier for chunks: give --redis-url, --memory-bytes or --disk-path"
            )
        if self.seal_key_file and not self.redis_url:
            raise ConfigError("--seal-key-file needs --redis-url: only values in Redis are sealed")
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ConfigError("--tls-key and --tls-client-ca need --tls-cert: give that as well")
        is_loopback = ipaddress.ip_address(parse_listen(self.listen)[0]).is_loopback
        restricted = parse_networks(self.allowed_peers) or self.tls_client_ca
        if not (is_loopback or restricted or self.allow_anyone):
            raise ConfigError(
                f"--listen {self.listen} is beyond loopback, where any client can read and replace "
                "chunks: give --allowed-peers or --tls-client-ca, or --allow-anyone if that is "
                "intended"
            )

    @property
    def payload_limit_bytes(self) -> int:
        """The size of the largest chunk; a client that sends a larger one is disconnected."""
        return min(self.buffer_bytes // 4, MAX_WIRE_LENGTH)


def parse_listen(text: str) -> tuple[str, int]:
    """Address and port of ``lm://ADDRESS:PORT``; port 0 means any free one."""
    # LMCache's client speaks IPv4 only.
    address = text.replace("lm://localhost:", "lm://127.0.0.1:")
    return parse_address(address, "--listen", "lm://")


def parse_networks(text: str | None) -> tuple[Network, ...] | None:
    """The networks of ``allowed_peers``; None allows all."""
    if text is None:
        return None
    try:
        return tuple(ipaddress.ip_network(each.strip()) for each in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--allowed-peers is {text!r} ({error}): write networks as 10.0.0.0/8,fd00::/8"
        ) from error
