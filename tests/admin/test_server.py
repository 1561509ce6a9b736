# SPDX-License-Identifier: Apache-2.0
"""How a server is reached, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis._parsers.base import BaseParser

from lmcache_redis.admin.server import open_server, sentence_of
from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisError,
    RedisProtocolError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.advice import BY_CODE, missing_right
from lmcache_redis.resp.net.wire import ErrorReply, error_of
from lmcache_redis.resp.options import parse_deployment
from tests.admin.cache import refused, user_of
from tests.resp.helpers import running
from tests.resp.trickling import LyingServer, Trickle
from tests.servers import RedisServer

SECRET = "s3cr3t/?#@:"


@pytest.fixture
def guarded(tmp_path: Path) -> RedisServer:
    return RedisServer(tmp_path, password=SECRET)


def test_tcp_unix_and_database(redis_server: RedisServer) -> None:
    for url in (redis_server.url, redis_server.unix_url):
        with open_server(RedisOptions(f"{url}?db=3")) as server:
            (node,) = server.nodes
            assert server.node_of(b"any") is node
            node.ask("SET", "key", "value")
    with redis_server.client(db=3) as client:
        assert client.get("key") == b"value"
        client.flushdb()


@pytest.mark.servers
def test_a_password(guarded: RedisServer) -> None:
    with guarded:
        with open_server(RedisOptions(guarded.url, password=SECRET)) as server:
            assert SECRET not in repr(server)
        for options in (RedisOptions(guarded.url), RedisOptions(guarded.url, password="wrong")):
            said = refused(options, RedisAuthError)
            assert SECRET not in said
            assert "wrong" not in said


def test_a_password_that_the_server_has_not(redis_server: RedisServer) -> None:
    options = RedisOptions(redis_server.url, password=SECRET)
    refused(options, RedisAuthError, "has no password: leave it out")
    with running(redis_server.url, password=SECRET) as plane:
        assert "has no password: leave it out of the Redis URL" in plane.state.reason


def test_a_sentinel_url_of_a_plain_server(redis_server: RedisServer) -> None:
    url = redis_server.url.replace("redis://", "redis+sentinel://") + "/mymaster"
    refused(RedisOptions(url), RedisUnavailable, "no Sentinel: write redis://")
    with running(url) as plane:
        assert "is no Sentinel: write redis:// instead" in plane.state.reason


def test_error_replies_stay_in_place(redis_server: RedisServer) -> None:
    with open_server(RedisOptions(redis_server.unix_url)) as server:
        (node,) = server.nodes
        node.ask("LPUSH", "list", "x")
        pong, refused, unknown, size = node.ask_all(
            [("PING",), ("GET", "list"), ("NOSUCH",), ("DBSIZE",)]
        )
        assert pong
        assert isinstance(refused, RedisReplyError)
        assert isinstance(unknown, RedisReplyError)
        assert size == 1
        with pytest.raises(RedisReplyError, match="WRONGTYPE"):
            node.ask("GET", "list")
        assert node.ask_all([]) == []


@pytest.mark.parametrize("code", sorted(set(BY_CODE) - {"ERR", "NOAUTH", "WRONGPASS"}))
def test_tools_give_the_advice_of_agents(code: str) -> None:
    """Which have a sentence of their own for credentials, in both."""
    words = "User ann has no permissions to run the 'get' command" if code == "NOPERM" else "1 h:1"
    endpoint = parse_deployment(RedisOptions("redis://h:1")).server
    told = str(sentence_of(BaseParser.parse_error(f"{code} {words}"), endpoint))
    change = missing_right(words) or BY_CODE[code].change
    assert change
    assert change in told
    assert change in str(error_of(ErrorReply(code, f"{code} {words}")))


def test_no_password_in_what_a_server_echoes(tmp_path: Path) -> None:
    def echo(words: list[bytes]) -> bytes | None:
        return b"-ERR no: %b\r\n" % b" ".join(words) if words[0] == b"AUTH" else None

    path = tmp_path / "password"
    path.write_text(SECRET)
    with LyingServer(echo) as lying:
        for options, instead in (
            (RedisOptions(lying.url, username="user", password=SECRET), "***"),
            (RedisOptions(lying.url, username="user", password_file=str(path)), "***"),
            (RedisOptions(lying.url, credential_provider=Rotating(SECRET)), "(not shown)"),
        ):
            said = refused(options, RedisError)
            assert instead in said
            assert SECRET not in said


def test_what_is_no_redis_and_what_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_redis.admin.server.OP_TIMEOUT_S", 0.2)
    with LyingServer(lambda words: b"HTTP/1.1 400 Bad Request\r\n\r\n") as web:
        refused(RedisOptions(web.url), RedisProtocolError, "does not speak Redis")
    with LyingServer(lambda words: Trickle(b"+OK\r\n", 60.0)) as silent:
        refused(RedisOptions(silent.url), RedisTimeout, "does not answer")


class Rotating:
    """A credential provider whose tokens last for one connect."""

    def __init__(self, *passwords: str) -> None:
        self.left = list(passwords)

    def get_credentials(self) -> tuple[str, ...]:
        return "some", self.left.pop(0)


def test_credentials_are_asked_at_each_connect(own_server: RedisServer, tmp_path: Path) -> None:
    user_of(own_server, "+@all")
    path = tmp_path / "password"
    path.write_text("first\n")
    rotating = Rotating("first", "second")
    for options in (
        RedisOptions(own_server.unix_url, username="some", password_file=str(path)),
        RedisOptions(own_server.unix_url, credential_provider=rotating),
    ):
        own_server.command("ACL", "SETUSER", "some", "resetpass", ">first")
        with open_server(options) as server:
            own_server.command("ACL", "SETUSER", "some", "resetpass", ">second")
            path.write_text("second\n")
            own_server.command("CLIENT", "KILL", "USER", "some")
            assert server.nodes[0].ask("DBSIZE") == 0
        path.write_text("first\n")
    assert not rotating.left


def test_a_provider_that_fails_is_one_sentence(own_server: RedisServer, tmp_path: Path) -> None:
    failing = RedisOptions(own_server.unix_url, credential_provider=Rotating())
    refused(failing, RedisAuthError, "the credential provider failed: IndexError")
    path = tmp_path / "password"
    path.write_text("x")
    gone = RedisOptions(own_server.unix_url, password_file=str(path))
    path.unlink()
    refused(gone, (RedisAuthError, ConfigError), r"password file .* cannot be read")
