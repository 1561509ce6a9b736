# SPDX-License-Identifier: Apache-2.0
"""Options and URLs: what they mean, and what is refused without quoting a secret."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions, check_url
from lmcache_redis.resp.options import (
    Endpoint,
    StaticPassword,
    Topology,
    Transport,
    parse_deployment,
)

SECRET = "s3cr3t"

TCP, TLS, UNIX = (
    partial(Endpoint, transport) for transport in (Transport.TCP, Transport.TLS, Transport.UNIX)
)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://localhost", TCP("localhost", 6379)),
        ("redis://10.0.0.1:7000/3", TCP("10.0.0.1", 7000, db=3)),
        ("redis://[::1]:7000", TCP("::1", 7000)),
        ("redis://h?db=4", TCP("h", 6379, db=4)),
        ("rediss://h:1", TLS("h", 1)),
        ("valkey://h:1/2", TCP("h", 1, db=2)),
        ("Valkeys://h:1", TLS("h", 1)),
        ("redis://h.svc.local.", TCP("h.svc.local.", 6379)),
        ("unix:///run/r.sock", UNIX(path="/run/r.sock")),
        ("unix:///run/r%20s?db=2", UNIX(path="/run/r s", db=2)),
        ("redis://u:p%40ss@h", TCP("h", 6379, credentials=StaticPassword("u", "p@ss"))),
        ("redis://u:[p@h", TCP("h", 6379, credentials=StaticPassword("u", "[p"))),
        ("unix://:p@/r", UNIX(path="/r", credentials=StaticPassword(None, "p"))),
        (
            "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=no",
            TLS("h", 6379, tls=(("ssl_cert_reqs", "none"), ("ssl_check_hostname", False))),
        ),
    ],
)
def test_urls(url: str, endpoint: Endpoint) -> None:
    assert parse_deployment(RedisOptions(url)).server == endpoint


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "begin with redis://"),
        ("localhost:6379", "begin with redis://"),
        ("http://h", "begin with redis://"),
        ("redis://", "names no host"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h:x", "port"),
        ("redis://[::1", "cannot be read"),
        ("redis://h/zero", "database"),
        ("redis://h?db=-1", "database"),
        ("redis://h?socket_timeout=1", "unknown parameter: it may have db"),
        ("redis://h?ssl_ca_certs=/x", "needs rediss://"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "does not exist"),
        ("rediss://h?ssl_cert_reqs=maybe", "required, optional or none"),
        ("rediss://h?ssl_check_hostname=maybe", "true or false"),
        ("redis://h?db=1&db=2", "twice"),
        ("redis://u@h", "no password"),
        ("redis://h #", "white space"),
        ("unix://", "names no socket"),
        ("unix://redis.sock", "names no socket"),
        (f"redis://{'a' * 70}", "host name"),
        ("redis+sentinel://h", "name the master"),
        ("redis+sentinel://h/", "name the master"),
        ("redis+sentinel://h/a/b", "not a number"),
        ("redis+sentinel://h/a/0/c", "NAME/DB"),
        ("redis+sentinel://h/a?db=1", "after the name"),
        ("redis+cluster://h/1", "no databases"),
        ("redis+cluster://h?db=1", "database"),
        ("redis+cluster://h,", "empty host"),
        ("redis+cluster://", "empty host"),
        ("redis+cluster://h:x", "port"),
        ("redis+cluster://h?sentinel_password=x", "unknown parameter: it may have"),
        ("redis+cluster://u:p/ss@h", "empty host|percent-encoded|port|databases"),
        ("redis+other://h", "must begin with"),
        ("unix+cluster://h", "must begin with"),
        ("redis+sentinel://u@h/m", "no password"),
        ("redis://h1:6379,h2:6379", "several hosts: write redis\\+cluster://"),
        ("valkeys://h1,h2/0", "several hosts"),
        (f"redis://:a/{SECRET}@h", "a / before its @: characters like"),
        (f"redis://u:a/{SECRET}@h:1/2", "a / before its @"),
        (f"redis+cluster://u:a/{SECRET}@h", "a / before its @"),
        (f"redis+sentinel://:a/{SECRET}@h/name", "a / before its @"),
        ("valkey+unix://x", "must begin with redis://"),
    ],
)
def test_urls_that_name_no_server(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_url(RedisOptions(url))
    assert SECRET not in str(caught.value)
    assert "ss@h" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}/x@h",
        f"redis://:{SECRET}?x@h",
        f"redis://:{SECRET}#x@h",
        f"redis://u:{SECRET}",
        f"redis://u:{SECRET}@h:port",
        f"redis://u:{SECRET}@",
        f"redis://u:{SECRET}@h?{SECRET}=1",
        f"rediss://h?ssl_password={SECRET}&ssl_certfile=/no/such",
        f"redis:/u:{SECRET}@h",
    ],
)
def test_no_message_and_no_repr_shows_a_secret(url: str) -> None:
    options = RedisOptions(url, username="u", password=SECRET)
    assert SECRET not in repr(options)
    with pytest.raises(ConfigError) as caught:
        check_url(options)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_credentials_of_the_options_win() -> None:
    options = RedisOptions("redis://u:p@h", username="v", password=SECRET)
    endpoint = parse_deployment(options).server
    assert endpoint.credentials == StaticPassword("v", SECRET)
    assert SECRET not in f"{endpoint!r} {endpoint} {endpoint.where}"


def test_tls_files_are_looked_for(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    endpoint = parse_deployment(RedisOptions(f"rediss://h?ssl_ca_certs={ca}")).server
    assert endpoint.tls == (("ssl_ca_certs", str(ca)),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"connections": 0},
        {"connections": 65},
        {"network_threads": 0},
        {"connections": True},
        {"op_timeout_s": 0},
        {"connect_timeout_s": -1},
        {"probe_interval_s": float("nan")},
        {"heartbeat_s": "1"},
    ],
)
def test_impossible_options(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "[-_]")):
        RedisOptions("redis://h", **wrong)  # type: ignore[arg-type]


# ----------------------------------------------------------- several servers


def test_one_server() -> None:
    found = parse_deployment(RedisOptions("redis://h:1/2"))
    assert found.topology is Topology.STANDALONE
    assert found.seeds == (found.server,)
    assert found.seeds[0].where == "h:1"


def test_a_cluster() -> None:
    options = RedisOptions("redis+cluster://me:s%40crt@a,b:7001,[::1],[fe80::2]:7003")
    found = parse_deployment(options)
    assert found.topology is Topology.CLUSTER
    assert [(s.host, s.port) for s in found.seeds] == [
        ("a", 6379), ("b", 7001), ("::1", 6379), ("fe80::2", 7003),
    ]  # fmt: skip
    assert {(s.credentials, s.db) for s in found.seeds} == {(StaticPassword("me", "s@crt"), 0)}
    node = found.at("c", 9)
    assert (node.host, node.port, node.credentials) == ("c", 9, StaticPassword("me", "s@crt"))
    assert found.url == "redis+cluster://a,b:7001,[::1],[fe80::2]:7003"
    assert "s@crt" not in repr(found) + found.url


def test_a_master_behind_sentinels() -> None:
    url = "rediss+sentinel://me:secret@a,b:7/my%20master/3?sentinel_username=w&sentinel_password=x"
    found = parse_deployment(RedisOptions(url + "&ssl_cert_reqs=none"))
    assert (found.topology, found.service) == (Topology.SENTINEL, "my master")
    assert [(s.host, s.port, s.db) for s in found.seeds] == [("a", 26379, 0), ("b", 7, 0)]
    assert {s.credentials for s in found.seeds} == {StaticPassword("w", "x")}
    server = found.at("c", 9)
    assert (server.credentials, server.db) == (StaticPassword("me", "secret"), 3)
    for endpoint in (*found.seeds, server):
        assert endpoint.transport is Transport.TLS
        assert dict(endpoint.tls) == {"ssl_cert_reqs": "none"}
    assert found.url == "rediss+sentinel://a,b:7/my%20master/3?ssl_cert_reqs=none"


def test_options_override_credentials_of_the_data_servers() -> None:
    options = RedisOptions("redis+sentinel://a/m", username="me", password="secret")
    found = parse_deployment(options)
    assert found.server.credentials == StaticPassword("me", "secret")
    assert found.seeds[0].credentials is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("redis://u:s3cr3t@h:7000/2", "redis://h:7000/2"),
        ("unix:///run/a%20b.sock?db=1", "unix:///run/a%20b.sock?db=1"),
        ("redis+sentinel://:s3cr3t@a:1,[::1]:2/m/3", "redis+sentinel://a:1,[::1]:2/m/3"),
        ("redis+sentinel://a:1/m?sentinel_password=s3cr3t", "redis+sentinel://a:1/m"),
        ("redis+cluster://:s3cr3t@a,b:7", "redis+cluster://a,b:7"),
        ("unix://me:s3cr3t@/run/a%20b.sock?db=3", "unix:///run/a%20b.sock?db=3"),
        ("rediss+sentinel://:s3cr3t@a,b:7/my%20m/3", "rediss+sentinel://a,b:7/my%20m/3"),
        (
            "rediss://h?ssl_cert_reqs=none&ssl_password=s3cr3t&ssl_check_hostname=false",
            "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false",
        ),
    ],
)
def test_the_url_that_tools_are_given_has_no_secret(given: str, shown: str) -> None:
    deployment = parse_deployment(RedisOptions(given))
    assert deployment.url == shown
    again = parse_deployment(RedisOptions(shown))
    assert (again.url, again.server.db) == (deployment.url, deployment.server.db)
    assert (again.topology, again.service) == (deployment.topology, deployment.service)
    for one, other in zip(deployment.seeds, again.seeds, strict=True):
        assert (one.where, one.db, one.transport) == (other.where, other.db, other.transport)
    assert dict(again.server.tls).keys() == dict(deployment.server.tls).keys() - {"ssl_password"}


@pytest.mark.parametrize("kind", [*Topology])
def test_valkey_is_another_word_for_redis(kind: Topology) -> None:
    rest = f"{kind.value}://u:p@h:1{'/name' if kind is Topology.SENTINEL else ''}"
    for ours, theirs in (("redis", "valkey"), ("rediss", "valkeys")):
        assert parse_deployment(RedisOptions(theirs + rest)) == parse_deployment(
            RedisOptions(ours + rest)
        )


def test_the_password_of_sentinels_need_not_be_in_the_url() -> None:
    url = "redis+sentinel://:data@h/name?sentinel_username=u&sentinel_password=old"
    found = parse_deployment(RedisOptions(url, sentinel_password=SECRET))
    assert found.seeds[0].credentials == StaticPassword("u", SECRET)
    assert found.server.credentials == StaticPassword(None, "data")
    assert SECRET not in repr(RedisOptions(url, sentinel_password=SECRET))
