"""Who may connect: the listening socket, allowed peers, TLS, socket options."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from lmcache_redis.errors import ConfigError
from lmcache_redis.gateway.config import GatewayConfig, Network

_BACKLOG = 1024
# For a client on this machine: enough without a round-trip time, and small enough to stay in the
# processor's cache. For others the kernel tunes it to the round-trip time.
_NEAR_SEND_BYTES = 512 << 10
# Detects a lost client after two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be used."""
    listener = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--listen: {host} port {port} cannot be used ({error.strerror}): choose another one"
        ) from error
    listener.setblocking(False)
    return listener


def is_allowed(host: str, networks: Sequence[Network] | None) -> bool:
    """Whether a client may connect from this address; None allows all."""
    if networks is None:
        return True
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


def prepare(accepted: socket.socket) -> None:
    """Sets the options of a client's socket. Raises OSError if the client is gone."""
    accepted.setblocking(False)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        accepted.setsockopt(socket.IPPROTO_TCP, option, value)
    if accepted.getsockname()[0] == accepted.getpeername()[0]:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_SEND_BYTES)


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """The TLS settings as a context; None for no TLS. Raises ConfigError for unusable files."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client that closes after a PUT has not read session tickets. That resets the connection, and
    # the server loses what it has not read yet.
    context.num_tickets = 0
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used "
            f"({error}): name PEM files of a certificate and its key without a pass phrase"
        ) from error
    if config.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(Path(config.tls_client_ca))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tls-client-ca {config.tls_client_ca} cannot be used ({error}): "
                "name a PEM file of certificates"
            ) from error
    return context


def _no_password() -> str:
    return ""  # instead of a prompt on the terminal
