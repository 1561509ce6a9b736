# SPDX-License-Identifier: Apache-2.0
"""The server: who may connect, limits, figures, stopping.

One loop, one task for each client. The server accepts without asyncio's server: a client that may
not connect is refused before TLS spends anything on it, and each client counts against the limit
as soon as it is accepted.

`stop` lets requests in flight finish within a deadline, then cuts off the rest. Writes that are
still in flight belong to the cache: its owner flushes and closes it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmcache_redis import __version__
from lmcache_redis.compat.gateway.config import GatewayConfig, Network, parse_listen, parse_networks
from lmcache_redis.compat.gateway.connection import ClientConnection, QuietLog, Room, Shared
from lmcache_redis.compat.gateway.stream import ClientStream
from lmcache_redis.errors import ConfigError, StartError
from lmcache_redis.metrics.exporter import gauge, labelled
from lmcache_redis.objects.cache import ObjectCache
from lmcache_redis.processes import free_descriptors

logger = logging.getLogger(__name__)

# Descriptors for Redis, files and the log, beside those of clients.
_OTHER_DESCRIPTORS = 128
_PAUSE_AFTER_ACCEPT_ERROR_S = 0.2
_BACKLOG = 1024
# For a client on this machine: enough without a round-trip time, and small enough to stay in the
# processor's cache. For others the kernel tunes it to the round-trip time.
_NEAR_SEND_BYTES = 512 << 10
# Detects a lost client after two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))

# A client without a request for this long gives way to another one, if there are too many.
_IDLE_S = 600.0
# In which a header, a payload or a reply must be transferred, or the client is disconnected.
REQUEST_TIMEOUT_S = 60.0
# Clients of one address. A larger --max-connections allows it half of them.
_LEAST_OF_A_HOST = 512

# Since the start: name and meaning for Prometheus; the label, if there is one, and its values.
COUNTERS: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    ("connections", "connections accepted", "", ("",)),
    ("requests", "requests, by command", "command", ("put", "get", "exist", "list", "health")),
    ("puts", "PUTs, by outcome", "outcome", ("stored", "not_stored")),
    ("gets", "GETs answered, by outcome", "outcome", ("hit", "miss")),
    ("payload_bytes", "payload moved", "direction", ("in", "out")),
    ("malformed_requests", "requests that failed, or whose connection was closed", "", ("",)),
    (
        "closed_connections",
        "connections closed before their client ended them properly, by reason", "reason",
        ("refused", "handshake", "stalled", "idle", "abandoned", "error"),
    ),
)  # fmt: skip


def counter_name(name: str, value: str) -> str:
    """Its name in `Shared.counters`."""
    return f"{name}_{value}" if value else name


class Gateway:
    """Serves a cache. Start and stop it once, on one running loop.

    The loop owns the cache; the caller closes it after `stop`. Raises ConfigError if the files of a
    certificate cannot be used.
    """

    def __init__(self, cache: ObjectCache, config: GatewayConfig) -> None:
        self.config = config
        self._networks = parse_networks(config.allowed_peers)
        self._tls: ssl.SSLContext | None = tls_context(config)
        room, log = Room(config.buffer_bytes), QuietLog(logger)
        counters = {counter_name(name, each): 0 for name, *_, values in COUNTERS for each in values}
        self._shared = Shared(cache, room, config.payload_limit_bytes, log, counters)
        self._clients: dict[asyncio.Task[None], ClientConnection] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, after `start`; for port 0, with the port that was chosen."""
        name: tuple[Any, ...] = self._listener.getsockname()
        return str(name[0]), int(name[1])

    @property
    def url(self) -> str:
        """`address` as a client writes it."""
        host, port = self.address
        return f"lm://[{host}]:{port}" if ":" in host else f"lm://{host}:{port}"

    def stats(self) -> dict[str, int]:
        """Counters, open connections, and payload bytes in flight. On any thread."""
        return {
            **self._shared.counters,
            "open_connections": len(self._clients),
            "buffer_used_bytes": self._shared.room.used_bytes,
        }

    def metrics(self) -> Iterator[Metric]:
        """What it exposes to Prometheus beside the counts of its tiers."""
        shared = self._shared
        for name, meaning, label, values in COUNTERS:
            counts = {
                (value,) if label else (): shared.counters[counter_name(name, value)]
                for value in values
            }
            labels = [label] if label else []
            yield labelled(CounterMetricFamily, f"gateway_{name}", meaning, labels, counts)
        about, version = "1; the version of the gateway", {(__version__,): 1}
        yield labelled(GaugeMetricFamily, "gateway_info", about, ["version"], version)
        yield gauge("gateway_open_connections", "clients now", len(self._clients))
        yield gauge("gateway_buffer_size_bytes", "`--buffer-bytes`", shared.room.size_bytes)
        yield gauge("gateway_buffer_used_bytes", "payload in flight", shared.room.used_bytes)
        is_up = "1 if the last tier answers, as the command HEALTH says"
        yield gauge("gateway_up", is_up, shared.cache.is_up)

    async def start(self) -> None:
        """Listens and serves. Raises StartError if the address cannot be used."""
        self._listener = listening(*parse_listen(self.config.listen))
        wanted, most = self.config.max_connections, free_descriptors() - _OTHER_DESCRIPTORS
        self._most_clients = max(1, min(wanted, most))
        if self._most_clients < wanted:
            logger.warning(
                "at most %d clients, not %d (--max-connections): raise the limit of open files",
                self._most_clients, wanted,
            )  # fmt: skip
        self._accepting = asyncio.ensure_future(self._accept())
        self._accepting.add_done_callback(_say_if_failed)

    async def stop(self) -> None:
        """Stops within the deadline of the config, or shortly after. Idempotent."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for connection in self._clients.values():
            connection.stop()
        if self._clients:
            await asyncio.wait([*self._clients], timeout=self.config.shutdown_deadline_s)
        for connection in self._clients.values():
            connection.stream.abort()
        for task in (left := [*self._clients]):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _accept(self) -> None:
        loop, shared = asyncio.get_running_loop(), self._shared
        while True:
            try:
                accepted, (host, port, *_) = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors, or the client is gone already: both are temporary.
                shared.log.warning("accept", "a client cannot be accepted: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_ACCEPT_ERROR_S)
                continue
            shared.counters["connections"] += 1
            if (problem := self._refuses(host)) is not None:
                shared.counters["closed_connections_refused"] += 1
                shared.log.warning("refused", "%s is turned away: %s", host, problem)
                accepted.close()
                continue
            peer, timeout_s = f"{host} port {port}", REQUEST_TIMEOUT_S
            stream = ClientStream(accepted, timeout_s, partial(self._stalled, peer))
            connection = ClientConnection(stream, peer, shared)
            task = asyncio.ensure_future(self._serve(accepted, connection))
            self._clients[task] = connection
            task.add_done_callback(self._clients.pop)

    def _refuses(self, host: str) -> str | None:
        """Why a client may not connect. One that was idle for long gives way to it."""
        if not is_allowed(host, self._networks):
            return "it is in none of --allowed-peers"
        of_host = sum(each.peer.startswith(f"{host} ") for each in self._clients.values())
        if of_host >= (most := max(_LEAST_OF_A_HOST, self._most_clients // 2)):
            if not self._closes_idle(f"{host} "):
                raised = f"half of --max-connections, or {_LEAST_OF_A_HOST} if that is more"
                return f"one address may have at most {most:,} connections ({raised})"
        elif len(self._clients) >= self._most_clients and not self._closes_idle(""):
            return f"there are {len(self._clients)} clients already (--max-connections)"
        return None

    def _closes_idle(self, peer: str) -> bool:
        """Disconnects the client that is idle for longest. peer: how its name begins."""
        idle_since_s = asyncio.get_running_loop().time() - _IDLE_S
        idle = [
            each
            for each in self._clients.values()
            if each.peer.startswith(peer)
            and not each.stream.in_message
            and each.stream.waits_from_s < idle_since_s
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda each: each.stream.waits_from_s)
        self._shared.counters["closed_connections_idle"] += 1
        self._shared.log.warning(
            "idle", "%s is disconnected for another client: no request for over %.0f s",
            longest.peer, _IDLE_S,
        )  # fmt: skip
        longest.stream.abort()
        return True

    async def _serve(self, accepted: socket.socket, connection: ClientConnection) -> None:
        counters, log, stream = self._shared.counters, self._shared.log, connection.stream
        with contextlib.closing(stream):
            try:
                prepare(accepted)
                if self._tls is not None:
                    await stream.start_tls(self._tls)
            except OSError as error:
                counters["closed_connections_handshake"] += 1
                log.warning("handshake", "%s did not get connected: %s", connection.peer, error)
                return
            try:
                await connection.serve()
            except Exception:
                counters["closed_connections_error"] += 1
                logger.exception("a connection is closed because of a fault")

    def _stalled(self, peer: str) -> None:
        self._shared.counters["closed_connections_stalled"] += 1
        self._shared.log.warning(
            "stalled", "%s is disconnected: a message took more than %g s",
            peer, REQUEST_TIMEOUT_S,
        )  # fmt: skip


def _say_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("the gateway no longer works, start it again", exc_info=error)


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError if the address cannot be used."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6
        )
    except OSError as error:
        raise StartError(
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
        what = f"--tls-cert {config.tls_cert}"
        what += f" and --tls-key {config.tls_key}" if config.tls_key else ""
        how = "PEM files of a certificate and its key without a pass phrase"
        # An empty password instead of a prompt on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
        if config.tls_client_ca is not None:
            what, how = f"--tls-client-ca {config.tls_client_ca}", "a PEM file of certificates"
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(Path(config.tls_client_ca))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} cannot be used ({why}): name {how}") from error
    return context
