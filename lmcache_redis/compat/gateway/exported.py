"""What a gateway exports to Prometheus: its families, and their values."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lmcache_redis import __version__
from lmcache_redis.compat.gateway.server import Gateway
from lmcache_redis.metrics import Metrics
from lmcache_redis.metrics.exporter import TIER_FAMILIES, ByLabel, Family, Values, labelled

_BY_LABEL: Final[ByLabel] = MappingProxyType(
    {
        Family("gateway_requests", "counter", "requests, by command", ("command",)): {
            "put": "puts",
            "get": "gets",
            "exist": "exists",
            "list": "lists",
            "health": "healths",
        },
        Family("gateway_gets", "counter", "GETs answered, by outcome", ("outcome",)): {
            "hit": "hits",
            "miss": "misses",
        },
        Family(
            "gateway_puts",
            "counter",
            "PUTs, by outcome",
            ("outcome",),
            "`not_stored`: no tier took the chunk, for lack of room or of a server",
        ): {"stored": "stored", "not_stored": "not_stored"},
        Family("gateway_payload_bytes", "counter", "payload moved", ("direction",)): {
            "in": "payload_bytes_in",
            "out": "payload_bytes_out",
        },
        Family(
            "gateway_closed_connections",
            "counter",
            "connections closed before their client ended them properly, by reason",
            ("reason",),
            "`refused`: not in `--allowed-peers`, or too many. `handshake`: TLS "
            "fails. `stalled`, `abandoned`: clients or their network hang or die. `error`: a fault "
            "of the gateway, see its log.",
        ): {
            "refused": "refused_connections",
            "handshake": "failed_handshakes",
            "stalled": "stalled",
            "idle": "idle",
            "abandoned": "abandoned",
            "error": "errors",
        },
    }
)
_ALONE: Final = MappingProxyType(
    {
        "connections": Family("gateway_connections", "counter", "connections accepted"),
        "malformed": Family(
            "gateway_malformed_requests",
            "counter",
            "requests that failed, or whose connection was closed",
            high="a client speaks another version of the protocol",
        ),
    }
)
_GAUGES: Final = (
    Family("gateway_info", "gauge", "1; the version of the gateway", ("version",)),
    Family("gateway_open_connections", "gauge", "clients now"),
    Family("gateway_buffer_size_bytes", "gauge", "`--buffer-bytes`"),
    Family(
        "gateway_buffer_used_bytes",
        "gauge",
        "payload in flight",
        high="near the size: clients wait for space; a larger `--buffer-bytes`",
    ),
    Family("gateway_up", "gauge", "1 if the last tier answers, as the command HEALTH says"),
)

FAMILIES: Final = (*_BY_LABEL, *_ALONE.values(), *_GAUGES, *TIER_FAMILIES)


def values_of(gateway: Gateway, metrics: Metrics, *, is_up: bool) -> Values:
    """The values of FAMILIES. On the gateway's loop."""
    stats = gateway.stats()
    return {
        **labelled(_BY_LABEL, stats),
        **labelled(TIER_FAMILIES, metrics.snapshot()),
        **{family.name: {(): stats[name]} for name, family in _ALONE.items()},
        "gateway_info": {(__version__,): 1},
        "gateway_open_connections": {(): stats["open_connections"]},
        "gateway_buffer_size_bytes": {(): stats["buffer_bytes"]},
        "gateway_buffer_used_bytes": {(): stats["buffer_used_bytes"]},
        "gateway_up": {(): is_up},
    }
