# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.server import open_server
from lmcache_redis.errors import RedisAuthError, RedisError, RedisProtocolError, RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.net.wire import PING_COMMAND
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.tiers import ReadOutcome, WriteOutcome
from tests.resp.helpers import Chunk, check_moves, open_streams, read, running, wait_until, write
from tests.resp.odd import ENVOY, TWEMPROXY, Answers, OddProxy
from tests.resp.trickling import LyingServer
from tests.servers import RedisServer, free_port

SECRET = "s3cr3t"


def connector(url: str, timeout_s: float = 5.0, **settings: Any) -> Connector:
    return Connector(parse_deployment(RedisOptions(url, **settings)).server, timeout_s, timeout_s)


def check(connector: Connector) -> None:
    """Connect, PING, close."""
    with contextlib.closing(connector.open("lmcache-redis:test")) as connection:
        connection.call(PING_COMMAND, 1, time.monotonic() + 5.0)
        assert connection.plain_fileno >= 0, "the compiled mover can use it"
    assert open_streams(connector) == 0


# ----------------------------------------------------------- good servers


def test_tcp_and_unix_and_database(server: RedisServer) -> None:
    for url in (server.url, server.unix_url, f"{server.url}/3"):
        check(connector(url))
    connection = connector(f"{server.url}/3").open("lmcache-redis:name")
    with server.client() as client:
        (mine,) = [c for c in client.client_list() if c["name"] == "lmcache-redis:name"]
    assert mine["db"] == "3"
    assert mine["resp"] == "2"
    connection.close()


@pytest.mark.servers
def test_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    with RedisServer(tmp_path, host="::1", unix=False) as server:
        check(connector(server.url))


def test_a_user_with_few_rights_is_enough(own_server: RedisServer) -> None:
    own_server.command(
        *("ACL", "SETUSER", "cache", "on", f">{SECRET}", "~*", "-@all"),
        *("+get", "+set", "+exists", "+unlink", "+scan"),
    )
    url = own_server.url.replace("//", f"//cache:{SECRET}@")
    with running(url) as plane:
        assert plane.state.up, plane.state
        chunk = Chunk(1, 5000, 4096, seed=1)
        check_moves(plane, chunk)
        own_server.command("ACL", "SETUSER", "cache", "-get")
        assert read(plane, chunk) == [ReadOutcome.UNAVAILABLE]
        assert plane.state.up
        assert "NOPERM" in plane.state.reason
        own_server.command("ACL", "SETUSER", "cache", "-set", "+get")
        assert write(plane, Chunk(2, 100, 4096)) == [WriteOutcome.REJECTED]


# ------------------------------------------------------------ bad servers


def refused(connector: Connector) -> RedisError:
    with pytest.raises(RedisError) as caught:
        connector.open("x")
    assert caught.value.__cause__ is None
    assert open_streams(connector) == 0
    return caught.value


def test_nobody_there(tmp_path: Path) -> None:
    error = refused(connector(f"redis://127.0.0.1:{free_port()}"))
    assert isinstance(error, RedisUnavailable)
    assert "refuses connections" in str(error)
    error = refused(connector(f"unix://{tmp_path}/none"))
    assert "does not exist" in str(error)


@pytest.mark.servers
def test_credentials(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password=SECRET) as server:
        check(connector(server.url, password=SECRET))
        check(connector(server.unix_url.replace("//", f"//:{SECRET}@")))
        cases: list[dict[str, Any]] = [
            {},
            {"password": "wrong" + SECRET},
            {"username": "nobody", "password": "wrong" + SECRET},
        ]
        for settings in cases:
            error = refused(connector(server.url, **settings))
            assert isinstance(error, RedisAuthError)
            assert "password" in str(error)
            assert SECRET not in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x01",
        b"+OK\r\n+OK\r\n",
        b"+OK\r\n+",
        b"%1\r\n+x\r\n:1\r\n:1\r\n",
    ],
)
def test_what_does_not_speak_redis(reply: bytes) -> None:
    with LyingServer(lambda words: reply) as server:
        assert isinstance(refused(connector(server.url)), RedisProtocolError)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-NOAUTH Authentication required.\r\n", RedisAuthError),
        (b"-DENIED Redis is running in protected mode\r\n", RedisUnavailable),
        (b"-ERR max number of clients reached\r\n", RedisUnavailable),
        (b"-LOADING Redis is loading the dataset in memory\r\n", RedisUnavailable),
    ],
)
def test_refusals_of_the_first_command(reply: bytes, kind: type[RedisError]) -> None:
    with LyingServer(lambda words: reply) as server:
        assert type(refused(connector(server.url))) is kind


@pytest.mark.parametrize(
    "reply",
    [
        b"-NOPERM no CLIENT\r\n",
        b"-ERR unknown command\r\n",
        b"-unsupported command 'client'\r\n",
        b"-Error: Server closed the connection\r\n",
        b"-invalid request\r\n",
        b"-\r\n",
        b"+QUEUED\r\n",
    ],
)
def test_a_name_is_not_needed(reply: bytes) -> None:
    with LyingServer(lambda words: reply if words[0] == b"CLIENT" else None) as server:
        check(connector(server.url))


@pytest.mark.parametrize("password", [None, SECRET])
def test_a_server_that_closes_at_a_name_gets_none(
    own_server: RedisServer, password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if password is not None:
        own_server.config_set("requirepass", password)
    with OddProxy(own_server.port, TWEMPROXY) as proxy:
        unnamed = connector(proxy.url, password=password)
        check(unnamed)
        assert proxy.accepted == 2
        check(unnamed)
        assert proxy.accepted == 3, "it is remembered"
        assert len([each for each in caplog.messages if "unnamed" in each]) == 1
        if password is not None:
            error = refused(connector(proxy.url, password="wrong" + SECRET))
            assert isinstance(error, RedisAuthError)
            assert isinstance(refused(connector(proxy.url)), RedisAuthError)


def test_who_always_closes_is_tried_twice_and_told() -> None:
    with OddProxy(0, dict.fromkeys((b"CLIENT", b"PING"))) as proxy:
        error = refused(connector(proxy.url))
        assert isinstance(error, RedisUnavailable)
        assert "was lost" in str(error)
        assert proxy.accepted == 2


@pytest.mark.parametrize("answers", [ENVOY, TWEMPROXY])
def test_chunks_pass_a_proxy_that_knows_few_commands(server: RedisServer, answers: Answers) -> None:
    with OddProxy(server.port, answers) as proxy, running(proxy.url) as plane:
        check_moves(plane, Chunk(1, 300_000, 1 << 16, seed=1))


def test_an_aborted_connector_lets_nobody_wait(own_server: RedisServer) -> None:
    patient = connector(own_server.url, timeout_s=60.0)
    connection = patient.open("x")
    own_server.stop()
    errors: list[RedisError] = []

    def wait_for(action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except RedisError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=wait_for, args=(action,))
        for action in (
            lambda: connection.call(PING_COMMAND, 1, time.monotonic() + 60.0),
            lambda: patient.open("y"),
        )
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(not each.is_open for each in list(patient._connections)))
    patient.abort()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [isinstance(error, RedisUnavailable) for error in errors] == [True] * 2
    with pytest.raises(RedisUnavailable, match="closed"):
        patient.open("z")
    own_server.cont()


# ---------------------------------------------------------------- sentences


def test_a_name_server_that_does_not_answer_is_no_wrong_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, says in (
        (socket.EAI_AGAIN, "cannot be looked up now: is the name server reachable"),
        (socket.EAI_NONAME, "has a host name that is unknown: correct the Redis URL"),
    ):

        def fails(*args: Any, kind: int = kind, **named: Any) -> Any:
            raise socket.gaierror(kind, "as told")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        assert says in str(refused(connector("redis://cache.example")))


def test_a_sentinel_that_wants_a_password_of_its_own() -> None:
    """The one in the URL is of the servers."""
    with LyingServer(lambda words: b"-NOAUTH Authentication required.\r\n") as sentinel:
        url = sentinel.url.replace("redis://", "redis+sentinel://:data@") + "/name"
        (seed,) = parse_deployment(RedisOptions(url)).seeds
        said = str(refused(Connector(seed, 5.0, 5.0)))
        assert "?sentinel_password= into the Redis URL, or set LMCACHE_REDIS_SENTINEL" in said
        with pytest.raises(RedisAuthError, match=r"\?sentinel_password="):
            open_server(RedisOptions(url)).__enter__()


def test_tls_is_for_sentinels_and_servers_or_for_neither(own_server: RedisServer) -> None:
    both = "rediss+sentinel:// is TLS to Sentinels and servers, redis+sentinel:// to neither"
    url = f"rediss+sentinel://127.0.0.1:{own_server.port}/name"
    found = parse_deployment(RedisOptions(url))
    for endpoint in (*found.seeds, found.at("127.0.0.1", own_server.port)):
        assert both in str(refused(Connector(endpoint, 0.5, 0.5)))
    with LyingServer(lambda words: b"\x15\x03\x01") as server:
        plain = parse_deployment(RedisOptions("redis+sentinel://h/name")).at(
            "127.0.0.1", server.port
        )
        assert both in str(refused(Connector(plain, 2.0, 2.0)))
