"""`/metrics` for Prometheus and `/healthz` for probes: a small HTTP server on threads of its own.

It serves what `Metrics` has counted, and what an `OwnerCollector` reads on the loop of an agent or
a gateway. /healthz answers 200 while that loop turns, and 503 with the reason when it does not.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_redis.errors import StartError
from lmcache_redis.metrics import PREFIX

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 8
_DEADLINE_S = 5.0
_NO_DESCRIPTOR_PAUSE_S = 0.1


class NoReading(Exception):
    """Why there are no values now."""


def gauge(name: str, meaning: str, value: float) -> Metric:
    """name: without `PREFIX`, as in `labelled`."""
    return GaugeMetricFamily(PREFIX + name, meaning, value=value)


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    meaning: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> Metric:
    """values: by tuples of the values of the labels."""
    family = kind(PREFIX + name, meaning, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family


@dataclass(frozen=True)
class OwnerCollector(Collector):
    """Metrics that `read` makes on a loop. post: runs an action there soon, from any thread."""

    post: Callable[[Callable[[], None]], None]
    read: Callable[[], Iterable[Metric]]
    answer_s: float = 2.0

    def collect(self) -> list[Metric]:
        """Raises NoReading if the loop does not turn."""
        found: list[list[Metric]] = []
        turned = threading.Event()

        def read() -> None:
            try:
                found.append(list(self.read()))
            finally:
                turned.set()

        self.post(read)
        if not turned.wait(self.answer_s):
            raise NoReading(f"the loop has not turned for {self.answer_s:g} s")
        if not found:
            raise NoReading("the values could not be read; see the log")
        return found[0]

    def describe(self) -> list[Metric]:
        """None before they are asked for."""
        return []


class _MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections, which have one deadline; others are closed at once.

    Anyone on the node may connect, and the process needs its threads and descriptors.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int]) -> None:
        self._deadlines: dict[socket.socket, float] = {}  # of the requests in progress
        self._lock = threading.Lock()
        super().__init__(address, _MetricsRequest)

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


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _MetricsRequest(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


@dataclass
class Exporter:
    """Serves from entry to exit. Raises StartError on entry if the address cannot be used.

    owner: what /healthz asks. counted: the other metrics.
    """

    address: tuple[str, int]
    owner: OwnerCollector
    counted: Collector
    _server: _MetricsServer = field(init=False, repr=False)

    @property
    def port(self) -> int:
        """Where it listens; for port 0, the port that was chosen."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Exporter:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        registry.register(self.owner)
        registry.register(self.counted)
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
                    self.owner.collect()
                    return _answer(start, "200 OK", "ok")
            except NoReading as reason:
                return _answer(start, "503 Service Unavailable", str(reason))
            return _answer(start, "404 Not Found", "there are /metrics and /healthz")

        host, _ = self.address
        is_ipv6 = ":" in host
        try:
            self._server = (_MetricsServer6 if is_ipv6 else _MetricsServer)(self.address)
        except OSError as error:
            raise StartError(f"--metrics: {host} port {self.address[1]}: {error}") from error
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
