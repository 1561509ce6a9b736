# SPDX-License-Identifier: Apache-2.0
"""What is seen of a server, with all rights and with hardly any."""

from __future__ import annotations

import socket

import pytest

from lmcache_redis.admin.facts import Facts, _place, facts_of, gather
from lmcache_redis.admin.server import open_server
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.endpoint import Transport
from lmcache_redis.resp.options import parse_deployment
from tests.admin.cache import user_of
from tests.servers import RedisServer


def seen(options: RedisOptions) -> Facts:
    with open_server(options) as server:
        return gather(server, server.nodes[0])


def test_all_of_a_real_server(own_server: RedisServer) -> None:
    for name, value in (
        ("maxmemory", "100mb"),
        ("maxmemory-policy", "allkeys-lru"),
        ("save", "3600 1"),
        ("client-output-buffer-limit", "normal 10mb 5mb 7"),
    ):
        own_server.config_set(name, value)
    facts = seen(RedisOptions(own_server.unix_url))
    assert facts.where == f"unix://{own_server.socket_path}"
    assert (facts.transport, facts.local, facts.private) == (Transport.UNIX, True, True)
    assert facts.version is not None
    assert facts.version >= (6, 2)
    assert facts.role == "master"
    assert facts.cluster_enabled is False
    assert facts.maxmemory_bytes == 100 << 20
    assert facts.policy == "allkeys-lru"
    assert facts.save == "3600 1"
    assert facts.append_only is False
    assert facts.io_threads == 1
    assert facts.normal_buffer == (10 << 20, 5 << 20, 7)
    assert facts.unseen == ()
    assert not facts.has_password


def test_without_config_info_has_to_do(own_server: RedisServer) -> None:
    """As with managed services."""
    own_server.config_set("maxmemory", "100mb")
    own_server.config_set("maxmemory-policy", "volatile-lru")
    own_server.config_set("appendonly", "yes")
    facts = seen(user_of(own_server, "+@all", "-config"))
    assert (facts.transport, facts.local, facts.has_password) == (Transport.TCP, True, True)
    assert (facts.maxmemory_bytes, facts.policy) == (100 << 20, "volatile-lru")
    assert facts.append_only is True
    assert facts.save is None
    assert facts.io_threads is None
    assert facts.normal_buffer is None
    (unseen,) = facts.unseen
    assert unseen.startswith("CONFIG is refused")


def test_without_info_too_hardly_anything_is_seen(own_server: RedisServer) -> None:
    facts = seen(user_of(own_server, "+get", "+ping"))
    assert (facts.version, facts.maxmemory_bytes, facts.policy) == (None, None, None)
    assert [text.split()[0] for text in facts.unseen] == ["INFO", "CONFIG"]


@pytest.mark.parametrize(
    ("info", "known"),
    [
        ({}, {"version": None, "io_threads": None, "save_failed": None}),
        ({"redis_version": "7.2.4"}, {"product": "redis", "version": (7, 2, 4)}),
        (
            {"redis_version": "7.2.4", "valkey_version": "8.1.0"},
            {"product": "valkey", "version": (8, 1, 0)},
        ),
        ({"redis_version": 255.255}, {"version": (255, 255)}),
        ({"rdb_last_bgsave_status": "err"}, {"save_failed": True}),
        ({"rdb_last_bgsave_status": "ok"}, {"save_failed": False}),
        ({"role": "slave"}, {"role": "slave"}),
        ({"evicted_keys": "?"}, {"evicted_keys": None}),
    ],
)
def test_info_alone(info: dict[str, object], known: dict[str, object]) -> None:
    facts = facts_of(info, {}, where="x")
    assert {name: getattr(facts, name) for name in known} == known


@pytest.mark.parametrize(
    ("host", "local", "private"),
    [
        ("127.0.0.1", True, True),
        ("[::1]", True, True),
        ("10.1.2.3", False, True),
        ("192.0.2.1", False, True),
        ("8.8.8.8", False, False),
    ],
)
def test_where_a_server_is(host: str, local: bool, private: bool) -> None:
    assert _place(parse_deployment(RedisOptions(f"redis://{host}")).server) == (local, private)


def test_a_server_whose_name_is_not_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert _place(parse_deployment(RedisOptions("redis://cache")).server) == (False, False)
