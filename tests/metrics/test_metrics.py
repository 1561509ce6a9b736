# SPDX-License-Identifier: Apache-2.0
"""Metrics: a closed set, exact under threads; and the HTTP server that shows them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_redis
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import COUNTERS, Metrics, exporter
from lmcache_redis.metrics.exporter import (
    NoReading,
    OwnerCollector,
    gauge,
    serve_metrics,
)
from lmcache_redis.tier_kinds import KINDS
from lmcache_redis.tiers import TierCounters
from tests.scraping import get
from tests.servers import wait_until


def test_everything_starts_at_zero_in_the_declared_order() -> None:
    snapshot = Metrics().snapshot()
    assert list(snapshot) == list(COUNTERS)
    assert set(snapshot.values()) == {0}


def test_counting() -> None:
    metrics = Metrics()
    metrics.count("lookups")
    metrics.count("loaded_bytes", 1 << 40)
    metrics.count("loaded_bytes", 0)
    with pytest.raises(KeyError, match="lookupps"):
        metrics.count("lookupps")
    with pytest.raises(ValueError, match="non-negative"):
        metrics.count("lookups", -1)
    metrics.snapshot()["lookups"] = 7  # a copy
    assert metrics.snapshot()["lookups"] == 1
    assert metrics.snapshot()["loaded_bytes"] == 1 << 40
    assert Metrics().snapshot()["lookups"] == 0, "caches of one process count apart"


def test_names_in_code_are_labels_of_what_is_exposed() -> None:
    metrics = Metrics()
    metrics.count("hit_chunks_host", 3)
    metrics.count("disk_loaded_bytes", 4)
    metrics.count("miss_corrupt")
    metrics.observe("hit_chunks", 8)
    metrics.observe("redis_load_seconds", 0.25)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = metrics.registry.get_sample_value(f"lmcache_redis_{name}", labels)
        return found

    assert value("hit_chunks_total", tier="host") == 3
    assert value("hit_chunks_total", tier="redis") == 0
    assert value("loaded_bytes_total", tier="disk") == 4
    assert value("missed_chunks_total", reason="corrupt") == 1
    assert value("lookup_hit_chunks_sum") == 8
    assert value("load_seconds_bucket", tier="redis", le="0.25") == 1
    assert value("load_seconds_bucket", tier="redis", le="0.1") == 0
    assert value("load_seconds_count", tier="disk") == 0


def test_what_something_else_counts_is_taken_over() -> None:
    metrics = Metrics()
    for total in (3, 3, 5):
        metrics.raise_to("redis_errors", total)
        assert metrics.snapshot()["redis_errors"] == total


def test_threads_do_not_lose_counts() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2_000):
            metrics.count("retrieves")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot()["retrieves"] == 8_000


def test_every_counter_is_counted_somewhere() -> None:
    package = Path(lmcache_redis.__file__).parent
    declared = package / "metrics" / "__init__.py"
    source = "".join(path.read_text() for path in package.rglob("*.py") if path != declared)
    of_kinds = {"hit_chunks_host"}
    for kind in KINDS[1:]:
        counters = TierCounters.of(kind)
        of_kinds |= {kind.hits, counters.loaded_chunks, counters.loaded_bytes, counters.silent}
        of_kinds |= {counters.stored_chunks, counters.stored_bytes, counters.plain_bytes}
        of_kinds.add(counters.queue_full)
        of_kinds |= {*counters.misses.values(), *counters.drops.values()}
    assert of_kinds <= {*COUNTERS}
    assert [name for name in COUNTERS if f'"{name}"' not in source and name not in of_kinds] == []


# --------------------------------------------------------- the server of /metrics


def at_once(action: Callable[[], None]) -> None:
    action()


def serve(
    host: str = "127.0.0.1", port: int = 0, page: Callable[..., list[bytes]] | None = None
) -> contextlib.AbstractContextManager[int]:
    owner = OwnerCollector(at_once, lambda: [gauge("a", "A.", 1)])
    return serve_metrics((host, port), owner, Metrics().registry, {"/": page} if page else {})


def asked(port: int, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, and all that follows them."""
    with connected(port) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


@pytest.fixture
def port() -> Iterator[int]:
    with serve() as port:
        yield port


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


def test_75_idle_clients_cost_8_threads_and_descriptors(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_GIVES_WAY_AFTER_S", 5.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(75)]
        assert sum(map(is_closed, clients)) == 75 - exporter._MOST_CONNECTIONS
        assert serving() == exporter._MOST_CONNECTIONS
    wait_until(lambda: not serving(), "the end of what served them")
    assert get(port, "/metrics")[0] == 200


def test_idle_clients_shut_out_no_probe(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_S", 60.0)
    monkeypatch.setattr(exporter, "_GIVES_WAY_AFTER_S", 0.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(exporter._MOST_CONNECTIONS)]
        wait_until(lambda: serving() == len(clients), "as many clients as are served")
        for _ in range(3):
            assert get(port, "/healthz")[0] == 200
            wait_until(lambda: serving() < len(clients), "the end of what served the probe")
        assert [is_closed(each) for each in clients] == [True] + [False] * (len(clients) - 1)


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


def page(_: object, start: Callable[..., None]) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/html"), ("X-Own", "yes")])
    return [b"<p>page</p>"]


def test_a_page_has_headers_of_its_own_and_others_are_refused() -> None:
    with serve(page=page) as port:
        code, headers, body = asked(port, "GET", "/")
        assert (code, headers["x-own"], body) == (200, "yes", b"<p>page</p>")
        assert int(headers["content-length"]) == len(body)
        code, headers, _ = asked(port, "POST", "/")
        assert (code, headers["allow"]) == (405, "get, head")
    with serve() as port:
        assert get(port, "/") == (404, "there are /metrics, /healthz\n")


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/", "/nowhere"])
def test_head_is_get_without_the_body(path: str) -> None:
    with serve(page=page) as port:
        code, headers, body = asked(port, "HEAD", path)
        whole = asked(port, "GET", path)
    assert (code, body) == (whole[0], b"")
    assert headers["content-type"] == whole[1]["content-type"]
    assert int(headers["content-length"]) > 0
    if path != "/metrics":  # of which the size changes
        assert int(headers["content-length"]) == len(whole[2])


def test_a_loop_that_does_not_turn_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_ANSWER_S", 0.01)
    owner = OwnerCollector(lambda action: None, list)
    with serve_metrics(("127.0.0.1", 0), owner, Metrics().registry) as port:
        for path in ("/healthz", "/metrics"):
            code, text = get(port, path)
            assert (code, text) == (503, "the loop has not turned for 0.01 s\n")


def test_a_probe_reads_no_values() -> None:
    read: list[int] = []

    owner = OwnerCollector(lambda action: action(), lambda: read.append(1) or [])
    with serve_metrics(("127.0.0.1", 0), owner, Metrics().registry) as port:
        before = len(read)
        assert get(port, "/healthz") == (200, "ok\n")
        assert len(read) == before
        get(port, "/metrics")
        assert len(read) == before + 1


def test_ipv6_and_an_address_in_use() -> None:
    with serve("::1") as port:
        assert "lmcache_redis_a 1.0" in get(port, "/metrics", "[::1]")[1]
        with (
            pytest.raises(ConfigError, match=f"--metrics: ::1 port {port}: .*in use"),
            serve("::1", port),
        ):
            pass


def test_a_reading_that_fails_is_told() -> None:
    def post(action: Callable[[], None]) -> None:
        with contextlib.suppress(ZeroDivisionError):
            action()

    with pytest.raises(NoReading, match="could not be read"):
        OwnerCollector(post, lambda: [gauge("a", "A.", 1 / 0)]).collect()
