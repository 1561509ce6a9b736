"""`/metrics` for Prometheus, `/healthz` for probes, `/` for people: a small HTTP server.

It runs on threads of its own, and serves what `Metrics` has counted and what is read on the loop of
an agent or a gateway (`read_on`). /healthz answers 200 while that loop turns, and 503 with the
reason when it does not. A gateway has no page at `/`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar
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
_ANSWER_S = 2.0
_NO_DESCRIPTOR_PAUSE_S = 0.1


_T = TypeVar("_T")
_Environ = dict[str, Any]


class HttpAnswer(NamedTuple):
    """Of an HTTP request. status: as in "200 OK"."""

    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes


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


def read_on(post: Callable[[Callable[[], None]], None], read: Callable[[], _T]) -> _T:
    """What `read` returns on a loop. post: runs an action there soon, from any thread.

    Raises NoReading if the loop does not turn.
    """
    found: Future[_T] = Future()

    def act() -> None:
        try:
            found.set_result(read())
        finally:  # the loop reports an error
            found.cancel()

    post(act)
    try:
        return found.result(_ANSWER_S)
    except CancelledError:
        raise NoReading("the values could not be read; see the log") from None
    except TimeoutError:
        raise NoReading(f"the loop has not turned for {_ANSWER_S:g} s") from None


@dataclass(frozen=True)
class OwnerCollector(Collector):
    """Metrics that `read` makes on a loop, see `read_on`."""

    post: Callable[[Callable[[], None]], None]
    read: Callable[[], Iterable[Metric]]

    def collect(self) -> list[Metric]:
        """Raises NoReading if the loop does not turn."""
        return read_on(self.post, lambda: [*self.read()])

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
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
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


class _MetricsRequest(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


@dataclass
class Exporter:
    """Serves from entry to exit. Raises StartError on entry if the address cannot be used.

    owner: what /healthz asks. counted: the other metrics. page: makes the page at `/`; None without
    one.
    """

    address: tuple[str, int]
    owner: OwnerCollector
    counted: Collector
    page: Callable[[], HttpAnswer] | None = None
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
        routes: dict[str, Callable[[_Environ], HttpAnswer]] = {
            "/metrics": lambda environ: _asked(metrics, environ),
            "/healthz": lambda environ: self._health(),
        }
        if (page := self.page) is not None:
            routes["/"] = lambda environ: page()

        host, _ = self.address
        try:
            self._server = _MetricsServer(self.address)
        except OSError as error:
            raise StartError(f"--metrics: {host} port {self.address[1]}: {error}") from error
        self._server.set_app(partial(_serve, routes))
        thread = threading.Thread(
            target=self._server.serve_forever, name="lmcache-redis-metrics", daemon=True
        )
        thread.start()
        logger.info(
            "metrics at http://%s:%d/metrics%s",
            f"[{host}]" if ":" in host else host,
            self.port,
            "" if self.page is None else ", a page for people at /",
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _health(self) -> HttpAnswer:
        self.owner.collect()
        return _text("200 OK", "ok")


def _serve(
    routes: Mapping[str, Callable[[_Environ], HttpAnswer]], environ: _Environ, start: Any
) -> list[bytes]:
    """A WSGI application. HEAD is answered as GET, without the body."""
    method, route = environ["REQUEST_METHOD"], routes.get(environ["PATH_INFO"])
    if route is None:
        answer = _text("404 Not Found", f"there are {', '.join(routes)}")
    elif method not in ("GET", "HEAD"):
        answer = _text("405 Method Not Allowed", "use GET or HEAD", ("Allow", "GET, HEAD"))
    else:
        try:
            answer = route(environ)
        except NoReading as reason:
            answer = _text("503 Service Unavailable", str(reason))
    headers = [each for each in answer.headers if each[0].lower() != "content-length"]
    start(answer.status, [*headers, ("Content-Length", str(len(answer.body)))])
    return [] if method == "HEAD" else [answer.body]


def _asked(app: Any, environ: _Environ) -> HttpAnswer:
    """What another WSGI application answers to GET."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    body = app({**environ, "REQUEST_METHOD": "GET"}, lambda *given: started.append(given[:2]))
    return HttpAnswer(*started[0], b"".join(body))


def _text(status: str, text: str, *headers: tuple[str, str]) -> HttpAnswer:
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return HttpAnswer(status, [kind, *headers], f"{text}\n".encode())
