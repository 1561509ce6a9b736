# SPDX-License-Identifier: Apache-2.0
"""Look-ups of maps: how often, on which connections, with which rights, and of which names."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_redis.errors import RedisError
from lmcache_redis.resp import RedisOptions, finder
from lmcache_redis.resp.finder import ServerFinder
from lmcache_redis.resp.maps import Answer, ServerMap, judge_cluster, judge_master
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.resp.sources import Doubt
from tests.resp.helpers import running, wait_until
from tests.resp.test_node import slots_of
from tests.resp.trickling import Answer as Said
from tests.resp.trickling import LyingServer, packed

SLOTS = [b"CLUSTER", b"SLOTS"]


@contextlib.contextmanager
def finding(url: str) -> Iterator[ServerFinder]:
    deployment = parse_deployment(RedisOptions(url))
    with contextlib.closing(ServerFinder(deployment, 5.0)) as finder:
        yield finder


def test_whole_maps_are_fetched_now_and_then_while_slots_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a second."""
    monkeypatch.setattr(finder, "_MOVED_PAUSE_S", 0.3)
    times: list[float] = []

    def answer(words: list[bytes]) -> Said:
        if words != SLOTS:
            return None
        times.append(time.monotonic())
        # Each map is another one.
        others = [server.port] * (1 + len(times) % 2)
        return slots_of(*others, server.port)

    with (
        LyingServer(answer) as server,
        running(f"redis+cluster://127.0.0.1:{server.port}") as plane,
    ):
        hinting = threading.Event()

        def hint() -> None:
            while not hinting.wait(0.002):
                plane._nodes.watcher.hint()

        thread = threading.Thread(target=hint)
        thread.start()
        try:
            wait_until(lambda: len(times) > 3)
        finally:
            hinting.set()
            thread.join()
    assert all(later - earlier > 0.28 for earlier, later in itertools.pairwise(times[1:]))


def test_a_long_outage_costs_no_connections() -> None:
    """A shard is down, and the three others say what they said before."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(LyingServer(lambda words: slots_of(*ports))) for _ in range(3)]
        ports = [1, *[node.port for node in nodes]]
        finder = stack.enter_context(finding(f"redis+cluster://127.0.0.1:{ports[1]}"))
        down = finder.find().servers[:1]
        for _ in range(40):
            finder.find(Doubt.BROKEN, down)
        said = [words for node in nodes for words in node.commands]
        assert said.count(SLOTS) > 100
        assert len([words for words in said if words[0] == b"CLIENT"]) < 20


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_user_without_the_right_loses_what_it_buys(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(words: list[bytes]) -> Said:
        if words[1:2] in ([b"INFO"], [b"MASTER"]):
            return b"-NOPERM this user has no permissions\r\n"
        if words[0] == b"SENTINEL":
            return packed([b"127.0.0.1", b"7000"])
        return slots_of(7000) if words == SLOTS else None

    caplog.set_level(logging.INFO)
    url = "redis+{}://127.0.0.1:{}{}"
    with (
        LyingServer(answer) as server,
        finding(url.format(kind, server.port, "/main" if kind == "sentinel" else "")) as finder,
    ):
        for _ in range(3):
            assert [each.port for each in finder.find(Doubt.MOVED).servers] == [7000]
        assert caplog.text.count("is noticed later: NOPERM this user") == 1


def test_a_name_is_looked_up_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    goes_on = threading.Event()
    look_up = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "slow.test":
            return look_up(host, *args, **kwargs)
        if kwargs["flags"]:
            raise socket.gaierror
        asked.append(host)
        goes_on.wait(60)
        return look_up("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with LyingServer() as server:
        deployment = parse_deployment(RedisOptions(f"redis://slow.test:{server.port}"))
        connector = Connector(deployment.server, 0.05, 5.0)
        try:
            for _ in range(10):
                with pytest.raises(RedisError, match="does not answer"):
                    connector.open("test")
            assert asked == ["slow.test"]
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("redis-name") == 1
        finally:
            goes_on.set()
        wait_until(lambda: "redis-name" not in {each.name for each in threading.enumerate()})
        connector = Connector(deployment.server, 30.0, 5.0)
        connector.open("test").close()
        connector.open("test").close()
        assert len(asked) == 3


# ------------------------------------------------------------------ what is said

ONE = ServerMap((Endpoint(Transport.TCP, "10.0.0.1", 6379),))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (None, (None, "")),
        (b"", (None, "")),
        (b"cluster_state:ok\r\ncluster_current_epoch:7\r\n", (7, "")),
        (b"cluster_state:fail\r\ncluster_current_epoch:6\r\n", (6, "cluster_state fail")),
        (b"cluster_current_epoch:-1\r\nx\r\n:\r\n", (None, "")),
        (b"cluster_current_epoch:" + b"9" * 400, (None, "")),
        (b"\xff\xfe", (None, "")),
    ],
)
def test_what_a_node_says_of_itself(info: bytes | None, expected: tuple[int | None, str]) -> None:
    assert judge_cluster(ONE, info) == Answer(ONE, *expected)


def master(**fields: object) -> list[bytes]:
    some = {"ip": "10.0.0.1", "port": 6379, "flags": "master", "config_epoch": 3} | fields
    names = {name.replace("_", "-"): str(value).encode() for name, value in some.items()}
    return [word for name, value in names.items() for word in (name.encode(), value)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, (None, "")),
        ([], (None, "")),
        ([b"10.0.0.1", b"6379"], (None, "")),
        (master(), (3, "")),
        (master(role_reported="master", num_other_sentinels=2, quorum=2), (3, "")),
        (master(flags="s_down,master,o_down"), (3, "o_down, s_down")),
        (master(role_reported="slave"), (3, "which is a slave")),
        (master(num_other_sentinels=0, quorum=2), (3, "1 of 2 Sentinels")),
        # A failover is under way: what is down is the one before.
        (master(ip="10.0.0.9", flags="o_down,s_down,master"), (3, "")),
        ([b"flags", 1, None, [b"x"], b"odd"], (None, "")),
    ],
)
def test_what_a_sentinel_says_of_its_master(said: Any, expected: tuple[int | None, str]) -> None:
    assert judge_master(ONE, said) == Answer(ONE, *expected)
