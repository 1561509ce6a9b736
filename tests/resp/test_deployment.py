"""URLs of several servers: what they mean, and what is refused without quoting a secret."""

from __future__ import annotations

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions, check_url
from lmcache_redis.resp.options import StaticPassword, Topology, Transport, parse_deployment


def test_one_server() -> None:
    found = parse_deployment(RedisOptions("redis://h:1/2"))
    assert found.topology is Topology.STANDALONE
    assert found.seeds == (found.server,)
    assert found.where == "h:1"


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
    assert found.where == "cluster at a:6379,b:7001,[::1]:6379,[fe80::2]:7003"
    assert "s@crt" not in repr(found) + found.where


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
    assert found.where == "sentinel my master at a:26379,b:7"


def test_options_override_credentials_of_the_data_servers() -> None:
    options = RedisOptions("redis+sentinel://a/m", username="me", password="secret")
    found = parse_deployment(options)
    assert found.server.credentials == StaticPassword("me", "secret")
    assert found.seeds[0].credentials is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
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
        ("redis+cluster://h?sentinel_password=x", "not one of"),
        ("redis+cluster://u:p/ss@h", "empty host|percent-encoded|port|databases"),
        ("redis+other://h", "must begin with"),
        ("unix+cluster://h", "must begin with"),
        ("redis+sentinel://u@h/m", "no password"),
    ],
)
def test_what_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_url(RedisOptions(url))
    assert "ss@h" not in str(caught.value)
