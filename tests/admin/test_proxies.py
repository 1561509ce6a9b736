# SPDX-License-Identifier: Apache-2.0
"""The tools where a proxy answers, which lacks commands or answers them itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lmcache_redis.admin import stripes
from lmcache_redis.admin.doctor import examine
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.inspect import summarise
from lmcache_redis.admin.purge import Selection
from lmcache_redis.admin.report import summary_lines
from lmcache_redis.admin.server import open_server
from lmcache_redis.admin.stripes import survey
from lmcache_redis.errors import RedisError, RedisReplyError
from lmcache_redis.resp import RedisOptions
from tests.admin.cache import Cached, purge, user_of
from tests.resp.odd import ENVOY, TWEMPROXY, Answers, OddProxy
from tests.servers import RedisServer

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("answers", [ENVOY, TWEMPROXY])
def test_doctor_gets_to_its_end(own_server: RedisServer, answers: Answers) -> None:
    """What a proxy says of itself in INFO does not make it a node of a cluster."""
    with OddProxy(own_server.port, answers) as proxy:
        found = examine(RedisOptions(proxy.url), Need(), bandwidth=True)
    topics = {finding.topic for finding in found.findings}
    assert "cluster" not in topics
    assert {"latency", "load bandwidth", "not seen"} <= topics


def test_a_node_that_may_not_be_asked_for_slots_is_one(own_server: RedisServer) -> None:
    own_server.command("ACL", "SETUSER", "default", "-cluster|slots")
    moved = {
        b"INFO": ENVOY[b"INFO"],
        b"EXISTS": b"-MOVED 1 127.0.0.1:1\r\n",
    }
    with OddProxy(own_server.port, moved) as proxy:
        found = examine(RedisOptions(proxy.url), Need(), bandwidth=False)
        assert "cluster" in {finding.topic for finding in found.findings}
    with OddProxy(own_server.port, {b"INFO": ENVOY[b"INFO"]}) as proxy:
        found = examine(RedisOptions(proxy.url), Need(), bandwidth=False)
        assert "cluster" not in {finding.topic for finding in found.findings}


@pytest.mark.parametrize("reply", [ENVOY[b"DBSIZE"], b"-NOPERM no\r\n", b"+many\r\n", b"$-1\r\n"])
def test_inspect_and_purge_go_on_without_a_total(own_server: RedisServer, reply: bytes) -> None:
    with own_server.client() as client:
        Cached(1).put(client)
    with (
        OddProxy(own_server.port, {b"DBSIZE": reply}) as proxy,
        open_server(RedisOptions(proxy.url)) as server,
    ):
        summary = summarise(server, b"", everything=True, verify=True)
        assert (summary.groups[0].chunks, summary.survey.database_keys) == (1, None)
        summary.survey.whole = False
        assert any("a sample: about 500 keys were" in line for line in summary_lines(summary))
        result = purge(server, Selection(everything=True))
        assert (result.chunks, result.stripes) == (1, 3)


@pytest.mark.parametrize(
    "reply", [ENVOY[b"SCAN"], b"*2\r\n$1\r\nx\r\n*0\r\n", b"*0\r\n", b"+OK\r\n", None]
)
def test_a_server_that_cannot_list_is_named(own_server: RedisServer, reply: bytes | None) -> None:
    with (
        OddProxy(own_server.port, {b"SCAN": reply}) as proxy,
        open_server(RedisOptions(proxy.url)) as server,
        pytest.raises(RedisReplyError, match="does not list its keys"),
    ):
        survey(server, b"")


@pytest.mark.parametrize("total", [0, 1 << 60])
def test_a_scan_without_end(
    own_server: RedisServer, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample ends, whatever the server says it has; everything ends where memory does."""
    numbers = itertools.count()

    def scan(words: list[bytes]) -> bytes:
        keys = [b"else%d" % next(numbers)] * 99
        keys += [b"lmcr2:other%d" % next(numbers) for _ in range(100)]
        return b"*2\r\n$1\r\n7\r\n*%d\r\n" % len(keys) + b"".join(
            b"$%d\r\n%b\r\n" % (len(key), key) for key in keys
        )

    answers: dict[bytes, Any] = {b"SCAN": scan, b"DBSIZE": b":%d\r\n" % total}
    with (
        OddProxy(own_server.port, answers) as proxy,
        open_server(RedisOptions(proxy.url)) as server,
    ):
        found = survey(server, b"", everything=False)
        assert not found.whole
        assert not any(key.startswith(b"else") for key in found.other_keys)
        monkeypatch.setattr(stripes, "MOST_BYTES", 1 << 20)
        with pytest.raises(RedisReplyError, match="more keys than fit in memory"):
            survey(server, b"")


def test_a_user_who_may_not_ask_how_a_server_is(own_server: RedisServer) -> None:
    """Neither PING nor INFO nor DBSIZE, nor name itself (CLIENT)."""
    with own_server.client() as client:
        Cached(1).put(client)
    options = user_of(own_server, "+@read", "+unlink", "-ping", "-info", "-dbsize")
    with open_server(options) as server:
        (group,) = summarise(server, b"", everything=False, verify=False).groups
        assert group.chunks == 1
        with pytest.raises(RedisError, match=r"USER \+flushall"):
            server.nodes[0].ask("FLUSHALL")
    own_server.command("ACL", "SETUSER", "some", "-scan")
    with open_server(options) as server, pytest.raises(RedisError, match=r"USER \+scan"):
        survey(server, b"")
