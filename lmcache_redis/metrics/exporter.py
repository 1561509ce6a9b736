"""`/metrics` for Prometheus and `/healthz` for probes: a small HTTP server on threads of its own.

It knows families (`Family`) and where their values come from (`Source`). `agent.exported` and
`gateway.exported` have what these mean; what both have is here. docs/metrics.md lists the same
families.

/healthz answers 200 while the source answers, and 503 with the reason when it does not.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Distribution

logger = logging.getLogger(__name__)

PREFIX = "lmcache_redis_"
_MOST_CONNECTIONS = 8
_DEADLINE_S = 5.0
_NO_DESCRIPTOR_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. name: without `PREFIX` and, of counters, without ``_total``.

    kind: counter, gauge or histogram. high: what to do when it is high; empty if nothing is.
    """

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    high: str = ""

    @property
    def exposed_name(self) -> str:
        """As Prometheus sees it."""
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


class NoReading(Exception):
    """Why there are no values now."""


# Of each family, by the values of its labels.
Values: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float | Distribution]]
# Called on any thread. Raises NoReading.
Source: TypeAlias = Callable[[], Values]


# Of each family, the counter for each value of its label.
ByLabel: TypeAlias = Mapping[Family, Mapping[str, str]]

# What agent and gateway have in common.
TIER_FAMILIES: Final[ByLabel] = MappingProxyType(
    {
        Family("loaded_chunks", "counter", "chunks read into memory", ("tier",)): {
            "disk": "disk_loaded_chunks",
            "redis": "loaded_chunks",
        },
        Family("loaded_bytes", "counter", "payload bytes read into memory", ("tier",)): {
            "disk": "disk_loaded_bytes",
            "redis": "loaded_bytes",
        },
        Family("stored_chunks", "counter", "chunks written completely", ("tier",)): {
            "disk": "disk_stored_chunks",
            "redis": "stored_chunks",
        },
        Family("stored_bytes", "counter", "payload bytes of chunks written", ("tier",)): {
            "disk": "disk_stored_bytes",
            "redis": "stored_bytes",
        },
    }
)


def labelled(
    families: ByLabel, counters: Mapping[str, int]
) -> dict[str, Mapping[tuple[str, ...], float | Distribution]]:
    """The values of families of counters."""
    return {
        family.name: {(label,): counters[name] for label, name in labels.items()}
        for family, labels in families.items()
    }


@dataclass(frozen=True)
class OwnerSource:
    """A `Source` that reads on a loop. post: runs an action there soon, from any thread."""

    post: Callable[[Callable[[], None]], None]
    read: Callable[[], Values]
    answer_s: float = 2.0

    def __call__(self) -> Values:
        """Raises NoReading if the loop does not turn."""
        found: list[Values] = []
        turned = threading.Event()

        def read() -> None:
            try:
                found.append(self.read())
            finally:
                turned.set()

        self.post(read)
        if not turned.wait(self.answer_s):
            raise NoReading(f"the loop has not turned for {self.answer_s:g} s")
        if not found:
            raise NoReading("the values could not be read; see the log")
        return found[0]


@dataclass(frozen=True)
class _Readings(Collector):
    families: Sequence[Family]
    source: Source

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        values = self.source()
        for family in self.families:
            yield _metric(family, values.get(family.name, {}))


def _metric(family: Family, values: Mapping[tuple[str, ...], float | Distribution]) -> Metric:
    name, labels = PREFIX + family.name, family.labels
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.meaning, labels=labels)
        for each, value in values.items():
            assert isinstance(value, Distribution)
            buckets, seen = [], 0
            for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
                seen += count
                buckets.append((f"{bound:g}" if bound != float("inf") else "+Inf", seen))
            histogram.add_metric(each, buckets, value.total)
        return histogram
    kind: Any = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: Metric = kind(name, family.meaning, labels=labels)
    for each, value in values.items():
        metric.add_metric(each, value)  # type: ignore[attr-defined]
    return metric


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections, which have one deadline; others are closed at once.

    Anyone on the node may connect, and the process needs its threads and descriptors.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int]) -> None:
        self._deadlines: dict[socket.socket, float] = {}  # of the requests in progress
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # That of HTTPServer asks DNS for the name of the address, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError:
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # else this thread would spin
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._deadlines) >= _MOST_CONNECTIONS:
                return False
            self._deadlines[request] = time.monotonic() + _DEADLINE_S
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second. A thread that waits for an overdue client sees the connection's end."""
        now_s = time.monotonic()
        with self._lock:
            for request, deadline_s in self._deadlines.items():
                if now_s > deadline_s:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of /metrics went away", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


@dataclass
class Exporter:
    """Serves from entry to exit. Raises ConfigError on entry if the address cannot be used."""

    address: tuple[str, int]
    families: Sequence[Family]
    source: Source
    _server: _Server = field(init=False, repr=False)

    @property
    def port(self) -> int:
        """Where it listens; for port 0, the port that was chosen."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Exporter:
        registry = CollectorRegistry()
        registry.register(_Readings(self.families, self.source))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        metrics = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            try:
                if path == "/metrics":
                    answer: Iterable[bytes] = metrics(environ, start)
                    return answer
                if path == "/healthz":
                    self.source()
                    return _answer(start, "200 OK", "ok")
            except NoReading as reason:
                return _answer(start, "503 Service Unavailable", str(reason))
            return _answer(start, "404 Not Found", "there are /metrics and /healthz")

        host, _ = self.address
        is_ipv6 = ":" in host
        try:
            self._server = (_Server6 if is_ipv6 else _Server)(self.address)
        except OSError as error:
            raise ConfigError(f"--metrics: {host} port {self.address[1]}: {error}") from error
        self._server.set_app(app)
        thread = threading.Thread(
            target=self._server.serve_forever, name="lmcache-redis-metrics", daemon=True
        )
        thread.start()
        logger.info("metrics at http://%s:%d/metrics", f"[{host}]" if is_ipv6 else host, self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(start: Any, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]
