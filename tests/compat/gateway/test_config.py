# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway: bounds, addresses, networks, and the options made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_redis.cli.app import app
from lmcache_redis.compat.gateway import main as gateway_main
from lmcache_redis.compat.gateway.config import GatewayConfig, parse_listen, parse_networks
from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import option_name


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("lm://127.0.0.1:65432", ("127.0.0.1", 65432)), ("lm://localhost:1", ("127.0.0.1", 1)),
        ("lm://0.0.0.0:0", ("0.0.0.0", 0)), ("lm://[::1]:65535", ("::1", 65535)),
        ("lm://[2001:DB8::0:1]:80", ("2001:db8::1", 80)), ("lm://[::1%lo]:1", ("::1%lo", 1)),
    ],
)  # fmt: skip
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


NO_ADDRESSES = [
        "", "127.0.0.1:65432", "tcp://127.0.0.1:1", "lm://127.0.0.1", "lm://127.0.0.1:", "lm://:1",
        "lm://127.0.0.1:65536", "lm://127.0.0.1:01", "lm://127.0.0.1:1/", "lm://127.0.0.256:1",
        "lm://::1:1", "lm://[127.0.0.1]:1", "lm://[::1:1", "lm://example.org:1", "lm://a@[::1]:1",
        "LM://127.0.0.1:1", " lm://127.0.0.1:1", "lm://127.0.0.1:1\n",
]  # fmt: skip
NO_NETWORKS = ["", "10.0.0.0/33", "10.0.0.1/8", "host", "10.0.0.0/8,,::1"]


def test_networks() -> None:
    assert parse_networks(None) is None
    assert [str(n) for n in parse_networks("10.0.0.0/8, ::1") or ()] == ["10.0.0.0/8", "::1/128"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({"listen": text}, "--listen") for text in NO_ADDRESSES),
        *(({"allowed_peers": text}, "--allowed-peers") for text in NO_NETWORKS),
        ({"buffer_bytes": 1}, "--buffer-bytes"),
        ({"memory_bytes": -1}, "--memory-bytes"),
        ({"memory_bytes": 0}, "--redis-url"),
        ({"disk_size": 0}, "--disk-size"),
        ({"max_connections": 0}, "--max-connections"),
        ({"max_connections": True}, "--max-connections"),
        ({"shutdown_deadline_s": -1}, "--shutdown-deadline-s"),
        ({"tls_key": "x"}, "--tls-cert"),
        ({"seal_key_file": "x"}, "--redis-url"),
        ({"tls_client_ca": "x"}, "--tls-cert"),
        ({"log_level": "loud"}, "--log-level"),
    ],
)
def test_impossible_values(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GatewayConfig(**settings)


def test_the_largest_payload_fits_into_the_buffers() -> None:
    assert GatewayConfig(buffer_bytes=1 << 30).payload_limit_bytes == 256 << 20
    assert GatewayConfig(buffer_bytes=4 << 40).payload_limit_bytes == (1 << 31) - 1


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "[::]", "[2001:db8::1]"])
def test_beyond_loopback_somebody_has_to_be_kept_out(address: str) -> None:
    listen = f"lm://{address}:65432"
    tls = {"tls_cert": "server.pem", "tls_key": "key.pem"}
    for settings in ({}, tls):  # TLS alone hides what is said, and lets everybody in
        with pytest.raises(ConfigError) as refused:
            GatewayConfig(listen=listen, **settings)
        for word in (listen, "--allowed-peers", "--tls-client-ca", "--allow-anyone"):
            assert word in str(refused.value)
    GatewayConfig(listen=listen, allow_anyone=True)
    GatewayConfig(listen=listen, allowed_peers="10.0.0.0/8")
    GatewayConfig(listen=listen, tls_client_ca="ca.pem", **tls)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_is_open(address: str) -> None:
    GatewayConfig(listen=f"lm://{address}:65432")


def test_a_password_is_not_shown() -> None:
    shown = repr(GatewayConfig(redis_url="redis://:secret@x", redis_password="secret"))
    assert "secret" not in shown


def test_every_setting_has_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "listen": "lm://[::1]:7", "redis_url": "redis://cache:6379/2", "redis_username": "someone",
        "redis_password_file": "/run/password", "redis_credential_provider": "a.b:C",
        "seal_key_file": "seal.keys", "compress": "lossless",
        "key_prefix": "ours:", "memory_bytes": "2GiB", "disk_path": "/data", "disk_size": "1TB",
        "buffer_bytes": "64MiB", "max_connections": "7",
        "shutdown_deadline_s": "1", "tls_cert": "a.pem", "tls_key": "b.pem",
        "tls_client_ca": "c.pem", "allowed_peers": "10.0.0.0/8", "log_level": "warning",
        "allow_anyone": None, "metrics": "127.0.0.1:9464",
        "log_format": "json",
    }  # fmt: skip
    started: list[GatewayConfig] = []

    def run_gateway(config: GatewayConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(gateway_main, "run_gateway", run_gateway)
    monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", "secret")
    words = [word for name, value in values.items() for word in (option_name(name), value) if word]
    result = CliRunner().invoke(app, ["gateway", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (config,) = started
    assert {f.name for f in dataclasses.fields(config)} == {
        *values,
        "redis_password",
        "redis_sentinel_password",
    }
    assert (config.key_prefix, config.redis_password) == (b"ours:", "secret")
    assert (config.memory_bytes, config.disk_size) == (2 << 30, 10**12)
    assert (config.max_connections, config.shutdown_deadline_s) == (7, 1.0)
    assert config.allow_anyone
