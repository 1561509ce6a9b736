"""The HTTP server of /metrics: what it serves, and that its clients cost little."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Metrics, exporter
from lmcache_redis.metrics.exporter import Exporter, NoReading, OwnerCollector, gauge
from tests.scraping import get
from tests.servers import wait_until


def at_once(action: Callable[[], None]) -> None:
    action()


def serve(host: str = "127.0.0.1", port: int = 0) -> Exporter:
    owner = OwnerCollector(at_once, lambda: [gauge("a", "A.", 1)])
    return Exporter((host, port), owner, Metrics().registry)


@pytest.fixture
def port() -> Iterator[int]:
    with serve() as served:
        yield served.port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


def is_closed(client: socket.socket) -> bool:
    """By the server; a client that is served has nothing to read yet."""
    client.settimeout(0.1)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def serving() -> int:
    """Threads that serve a client."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_75_idle_clients_cost_8_threads_and_descriptors(port: int) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(75)]
        assert sum(map(is_closed, clients)) == 75 - exporter._MOST_CONNECTIONS
        assert serving() == exporter._MOST_CONNECTIONS
    wait_until(lambda: not serving(), "the end of what served them")
    assert get(port, "/metrics")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: a\r\n"])
def test_a_client_that_says_too_little_is_dropped(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sent: bytes,
) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_S", 0.05)
    with connected(port) as client:
        client.sendall(sent)
        while client.recv(1 << 16):  # ends, and so the server has closed it
            pass
    wait_until(lambda: not serving(), "the end of what served it")
    assert capfd.readouterr().err == ""


def test_a_client_that_trickles_is_dropped_in_all(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each byte is in time, the request is not."""
    monkeypatch.setattr(exporter, "_DEADLINE_S", 0.05)
    with connected(port) as client:

        def trickle() -> None:
            while True:
                client.sendall(b"G")
                time.sleep(0.01)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle()
    wait_until(lambda: not serving(), "the end of what served it")
    assert capfd.readouterr().err == ""


def test_a_loop_that_does_not_turn_is_not_healthy() -> None:
    owner = OwnerCollector(lambda action: None, list, answer_s=0.01)
    with Exporter(("127.0.0.1", 0), owner, Metrics().registry) as served:
        for path in ("/healthz", "/metrics"):
            code, text = get(served.port, path)
            assert (code, text) == (503, "the loop has not turned for 0.01 s\n")


def test_ipv6_and_an_address_in_use() -> None:
    with serve("::1") as served:
        assert "lmcache_redis_a 1.0" in get(served.port, "/metrics", "[::1]")[1]
        with (
            pytest.raises(ConfigError, match=f"--metrics: ::1 port {served.port}: .*in use"),
            serve("::1", served.port),
        ):
            pass


def test_a_reading_that_fails_is_told() -> None:
    def post(action: Callable[[], None]) -> None:
        with contextlib.suppress(ZeroDivisionError):
            action()

    with pytest.raises(NoReading, match="could not be read"):
        OwnerCollector(post, lambda: [gauge("a", "A.", 1 / 0)]).collect()
