# SPDX-License-Identifier: Apache-2.0
"""What is seen of a server, and what the doctor says of each fact: a table."""

from __future__ import annotations

import dataclasses
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.admin.facts import Facts, Need, _place, facts_of, gather
from lmcache_redis.admin.rules import ADVICE, Finding, Severity, judge
from lmcache_redis.admin.server import open_server
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.advice import NAME_THE_CLUSTER, NAME_THE_PRIMARY
from lmcache_redis.resp.net.endpoint import Transport
from lmcache_redis.resp.options import parse_deployment
from tests.admin.cache import user_of
from tests.servers import RedisServer

CRITICAL, WARNING, HINT, OK = Severity
GIB = 1 << 30
NEED = Need(128 << 10, 8000.0)

# A server that leaves nothing to be desired.
GOOD = Facts(
    where="cache:6380",
    transport=Transport.TLS,
    local=False,
    private=True,
    has_password=True,
    product="valkey",
    version=(8, 0, 1),
    role="master",
    cluster_enabled=False,
    machine_bytes=64 * GIB,
    maxmemory_bytes=48 * GIB,
    policy="allkeys-lru",
    evicted_keys=1000,
    save="",
    save_failed=False,
    append_only=False,
    io_threads=4,
    normal_buffer=(0, 0, 0),
    ping_s=0.0002,
    read_bytes_per_s=5e9,
    write_bytes_per_s=3e9,
    need=NEED,
)


def say(**changed: Any) -> list[Finding]:
    return judge(dataclasses.replace(GOOD, **changed))


def test_of_a_good_server_nothing_is_to_be_changed() -> None:
    findings = judge(GOOD)
    assert {finding.severity for finding in findings} == {OK}
    assert not any(finding.change or finding.why for finding in findings)


# What is changed about the good server; how much it matters, where it is said, and with what.
TABLE: list[tuple[dict[str, Any], Severity, str, str]] = [
    ({"role": "slave"}, CRITICAL, "role", NAME_THE_PRIMARY),
    ({"cluster_enabled": True}, CRITICAL, "cluster", "one node of a Redis Cluster"),
    ({"cluster_enabled": True}, CRITICAL, "cluster", NAME_THE_CLUSTER),
    ({"maxmemory_bytes": 0}, CRITICAL, "maxmemory", "CONFIG SET maxmemory 49152mb"),
    (
        {"maxmemory_bytes": 0, "machine_bytes": None},
        CRITICAL,
        "maxmemory",
        "redis.conf: maxmemory SIZE",
    ),
    ({"maxmemory_bytes": 60 * GIB}, WARNING, "maxmemory", "a machine that has 64 GiB"),
    ({"maxmemory_bytes": 9 * GIB}, WARNING, "maxmemory", "fewer than 10 prompts"),
    ({"maxmemory_bytes": 9 * GIB, "nodes": 3}, OK, "maxmemory", "with the 2 other servers"),
    ({"pool_bytes": 49 * GIB}, WARNING, "maxmemory", "agent has 49 GiB"),
    ({"pool_bytes": 40 * GIB}, OK, "maxmemory", "393,216 tokens, or 48 prompts of 8,192"),
    ({"oldest_idle_s": 120.0}, WARNING, "maxmemory", "none unused for more than 2 min"),
    ({"oldest_idle_s": 120.0, "evicted_keys": 0}, OK, "maxmemory", "48 prompts"),
    ({"oldest_idle_s": 7200.0}, OK, "maxmemory", "evicted so far"),
    ({"policy": "noeviction"}, CRITICAL, "maxmemory-policy", "maxmemory-policy allkeys-lru"),
    ({"policy": "volatile-lru"}, WARNING, "maxmemory-policy", "only keys that expire"),
    ({"policy": "allkeys-random"}, WARNING, "maxmemory-policy", "maxmemory-policy allkeys-lru"),
    ({"policy": "allkeys-lfu"}, OK, "maxmemory-policy", "allkeys-lfu"),
    ({"save_failed": True}, CRITICAL, "failed save", "refuses every store"),
    ({"save": "3600 1 300 100"}, WARNING, "snapshots", "3600 1 300"),
    ({"append_only": True}, WARNING, "append-only file", "CONFIG SET appendonly no"),
    (
        {"normal_buffer": (1 << 20, 0, 0)},
        CRITICAL,
        "client-output-buffer-limit",
        'CONFIG SET client-output-buffer-limit "normal 0 0 0"',
    ),
    (
        {"normal_buffer": (0, 1 << 20, 10)},
        CRITICAL,
        "client-output-buffer-limit",
        "redis.conf: client-output-buffer-limit normal 0 0 0",
    ),
    (
        {"clients_memory_bytes": 4 << 20},
        WARNING,
        "maxmemory-clients",
        "CONFIG SET maxmemory-clients 0",
    ),
    ({"clients_memory_bytes": GIB}, OK, "maxmemory-clients", "1 GiB for all clients"),
    ({"clients_memory_bytes": 0}, OK, "maxmemory-clients", "no limit"),
    ({"normal_buffer": (GIB, 64 << 20, 60)}, OK, "client-output-buffer-limit", "normal 107"),
    ({"io_threads": 1}, HINT, "io-threads", "redis.conf: io-threads 4"),
    ({"io_threads": 1, "read_bytes_per_s": 1e8}, WARNING, "io-threads", "one core copies"),
    ({"all_here": ("{a}/model",)}, WARNING, "braces", "here whose keys have '{a}/model'"),
    ({"version": (6, 0, 16)}, WARNING, "version", "older than 6.2"),
    ({"has_password": False}, CRITICAL, "password", "plant KV"),
    ({"has_password": False, "local": True}, HINT, "password", "LMCACHE_REDIS_PASSWORD"),
    ({"has_password": False, "transport": Transport.UNIX}, OK, "password", "permissions"),
    ({"transport": Transport.TCP}, HINT, "TLS", "private network"),
    ({"transport": Transport.TCP, "private": False}, WARNING, "TLS", "public address"),
    ({"transport": Transport.TCP, "local": True}, OK, "TLS", "on this machine"),
    ({"certificate_checked": False}, WARNING, "TLS", "not checked"),
    # Three connections of one stripe a round trip: 3 MiB / 5 ms = 0.6 GB/s.
    ({"ping_s": 0.005}, WARNING, "latency", "at most 0.84 GB/s, and hits need 1.05 GB/s"),
    ({"ping_s": 0.002}, HINT, "latency", "--connections"),
    (
        {"read_bytes_per_s": 0.9e9},
        CRITICAL,
        "load bandwidth",
        "128 KiB of KV a token x 8,000 tokens/s of prefill = 1.05 GB/s",
    ),
    ({"read_bytes_per_s": 1.5e9}, WARNING, "load bandwidth", "1.4 times as fast"),
    ({"read_bytes_per_s": 0.9e9, "local": True}, CRITICAL, "load bandwidth", "cores of its own"),
    ({"read_bytes_per_s": 0.9e9, "load_per_core": 1.5}, HINT, "load bandwidth", "load 1.5 a core"),
    ({"read_bytes_per_s": 0.9e9, "nodes": 3}, OK, "load bandwidth", "over 3 servers"),
    (
        {"read_bytes_per_s": None, "bandwidth_refused": "it is full"},
        WARNING,
        "bandwidth",
        "it is full",
    ),
    ({"write_bytes_per_s": 0.5e9}, HINT, "store bandwidth", "dropped"),
    ({"write_bytes_per_s": 0.1e9}, WARNING, "store bandwidth", "stores 0.10 GB/s"),
    ({"unseen": ("CONFIG is refused: save",)}, HINT, "not seen", "+config|get"),
]


@pytest.mark.parametrize(("changed", "severity", "topic", "says"), TABLE, ids=lambda v: str(v)[:60])
def test_each_fault(changed: dict[str, Any], severity: Severity, topic: str, says: str) -> None:
    (finding,) = [finding for finding in say(**changed) if finding.topic == topic]
    assert finding.severity is severity
    assert says in "\n".join((finding.seen, finding.why, *finding.change))
    if severity is not OK:
        assert finding.why
    # One fault does not make others, but for io-threads, which are judged by the bandwidth.
    others = {f.severity for f in say(**changed) if f.topic not in (topic, "load bandwidth")}
    assert others == {OK}


def test_the_server_takes_what_it_is_to_be_told(own_server: RedisServer, tmp_path: Path) -> None:
    changes = [c for changed, *_ in TABLE for finding in say(**changed) for c in finding.change]
    changes = [c for c in changes if "SIZE" not in c]  # depends on the machine
    commands = {c for c in changes if c.startswith("CONFIG SET ")}
    assert len(commands) == 6
    for command in commands:
        assert own_server.command(*shlex.split(command))
    # TLS wants files.
    lines = {c.removeprefix("redis.conf: ") for c in changes if c.startswith("redis.conf: ")}
    lines = {line for line in lines if not line.startswith("tls-")}
    assert {"io-threads 4", 'save ""'} <= lines
    directory = tmp_path / "second"
    directory.mkdir()
    words = [word for line in sorted(lines) for word in shlex.split(f"--{line}")]
    with RedisServer(directory, args=words) as server:
        assert server.command("CONFIG", "GET", "maxmemory-policy")


def test_what_could_not_be_seen_is_not_judged() -> None:
    nothing_seen = Facts(where="cache:6379", has_password=True, transport=Transport.TLS)
    assert {f.topic for f in judge(nothing_seen)} == {"password", "TLS"}


def test_a_fresh_redis_as_it_comes() -> None:
    """The worst comes first; of equals, what comes first in ADVICE."""
    findings = say(
        maxmemory_bytes=0, policy="noeviction", save="3600 1 300 100 60 10000", has_password=False
    )
    worst = [finding.topic for finding in findings if finding.severity is CRITICAL]
    assert worst == ["maxmemory", "maxmemory-policy", "password"]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "version": st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
            "machine_bytes": st.none() | st.integers(0, 1 << 45),
            "maxmemory_bytes": st.none() | st.integers(0, 1 << 45),
            "policy": st.none() | st.text(min_size=1, max_size=20),
            "save": st.none() | st.text(max_size=20),
            "normal_buffer": st.none() | st.tuples(*[st.integers(0, 1 << 40)] * 3),
            "ping_s": st.none() | st.floats(0, 100),
            "read_bytes_per_s": st.none() | st.floats(0, 1e12),
            "nodes": st.integers(1, 1000),
        },
    )
)
def test_every_rule_bears_any_facts(changed: dict[str, Any]) -> None:
    facts = dataclasses.replace(GOOD, **changed)
    for finding in judge(facts):
        assert finding.topic in ADVICE
        assert finding.seen
        if finding.severity is not OK:
            assert finding.why


# ------------------------------------------------------------------- the facts


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
