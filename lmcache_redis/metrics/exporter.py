# SPDX-License-Identifier: Apache-2.0
"""`/metrics` for Prometheus, `/healthz` for probes, and pages of an agent: a small HTTP server.

It runs on threads of its own, and serves what `Metrics` has counted and what is read on the loop of
an agent or a gateway (`ask_on`). /healthz answers 200 while that loop turns, and 503 with the
reason when it does not. HEAD is answered as GET is, without the body.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
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
from lmcache_redis.processes import NamedThread

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 8
_DEADLINE_S = 5.0
_GIVES_WAY_AFTER_S = 1.0
_NO_DESCRIPTOR_PAUSE_S = 0.1
_ANSWER_S = 2.0
_ADVICE = {
    errno.EADDRINUSE: "choose another port",
    errno.EACCES: "choose a port from 1024 on",
    errno.EADDRNOTAVAIL: "choose an address of this machine",
}

_T = TypeVar("_T")
WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]


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


def ask_on(
    post: Callable[[Callable[[], None]], None],
    ask: Callable[[Callable[[_T], None]], None],
    more_s: float = 0.0,
) -> _T:
    """What `ask` replies on a loop, now or later. post: runs an action there soon, from any thread.

    more_s: how long the reply itself may take. Raises NoReading if the loop does not turn.
    """
    found: Future[_T] = Future()

    def act() -> None:
        try:
            ask(found.set_result)
        except BaseException:
            found.cancel()
            raise  # the loop reports it

    post(act)
    answer_s = _ANSWER_S + more_s
    try:
        return found.result(answer_s)
    except CancelledError:
        raise NoReading("the values could not be read; see the log") from None
    except TimeoutError:
        raise NoReading(f"the loop has not turned for {answer_s:g} s") from None


def read_on(post: Callable[[Callable[[], None]], None], read: Callable[[], _T]) -> _T:
    """What `read` returns on a loop, as in `ask_on`."""

    def ask(reply: Callable[[_T], None]) -> None:
        reply(read())

    return ask_on(post, ask)


@dataclass(frozen=True)
class OwnerCollector(Collector):
    """Metrics that `read` makes on a loop, see `read_on`."""

    post: Callable[[Callable[[], None]], None]
    read: Callable[[], Iterable[Metric]]

    def collect(self) -> list[Metric]:
        """Raises NoReading if the loop does not turn."""
        return read_on(self.post, lambda: [*self.read()])


class _MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections, which have one deadline.

    Anyone on the node may connect, and the process needs its threads and descriptors. Beyond them
    the oldest gives way, so that clients which say nothing shut out no probe; if it has only just
    come, the newest is closed.
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
            now_s = time.monotonic()
            if len(self._deadlines) >= _MOST_CONNECTIONS:
                oldest, deadline_s = next(iter(self._deadlines.items()))
                if now_s < deadline_s - _DEADLINE_S + _GIVES_WAY_AFTER_S:
                    return False
                del self._deadlines[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._deadlines[request] = now_s + _DEADLINE_S
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


@contextlib.contextmanager
def serve_metrics(
    address: tuple[str, int],
    owner: OwnerCollector,
    counted: Collector,
    pages: Mapping[str, WsgiApp] = MappingProxyType({}),
) -> Iterator[int]:
    """Serves from entry to exit, and yields the port: for port 0 the one that was chosen.

    owner: its metrics, and whose loop /healthz asks. counted: the other metrics. pages: others, by
    path. Raises StartError on entry if the address cannot be used.
    """

    def health(_: object, start: Any) -> Iterable[bytes]:
        read_on(owner.post, lambda: None)  # a reading may change what the next one gives
        return plain_text(start, "200 OK", "ok")

    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(owner)
    registry.register(counted)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    routes: dict[str, WsgiApp] = {
        "/metrics": make_wsgi_app(registry), "/healthz": health, **pages
    }  # fmt: skip
    host, port = address
    try:
        server = _MetricsServer(address)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another address")
        raise StartError(f"--metrics: {host} port {port}: {error.strerror}: {advice}") from error
    server.set_app(partial(_serve, routes))
    NamedThread("lmcache-redis-metrics", server.serve_forever).start()
    logger.info(
        "metrics at http://%s:%d/metrics%s",
        f"[{host}]" if ":" in host else host,
        server.server_port,
        ", a page for people at /" if "/" in pages else "",
    )
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _serve(routes: Mapping[str, WsgiApp], environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """A WSGI application made of others, by path."""
    if environ["REQUEST_METHOD"] == "HEAD":
        return _head_of(partial(_serve, routes), environ, start)
    if (route := routes.get(environ["PATH_INFO"])) is None:
        return plain_text(start, "404 Not Found", f"there are {', '.join(routes)}")
    if environ["REQUEST_METHOD"] != "GET":
        return plain_text(start, "405 Method Not Allowed", "use GET", ("Allow", "GET, HEAD"))
    try:
        return route(environ, start)
    except NoReading as reason:  # none of them has started an answer then
        return plain_text(start, "503 Service Unavailable", str(reason))


def _head_of(route: WsgiApp, environ: dict[str, Any], start: Any) -> list[bytes]:
    """The status and the headers of a GET, the length of its body among them."""
    said: list[Any] = []
    body = b"".join(route({**environ, "REQUEST_METHOD": "GET"}, lambda *these: said.extend(these)))
    status, headers = said[:2]
    start(status, [*headers, ("Content-Length", str(len(body)))])
    return []


def plain_text(start: Any, status: str, text: str, *headers: tuple[str, str]) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{text}\n".encode()]
