# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: what a file may say, and which of file, environment and options holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import option_name
from lmcache_redis.sources import config_from


@pytest.fixture(autouse=True)
def _no_password_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_REDIS_PASSWORD", raising=False)
    monkeypatch.delenv("LMCACHE_REDIS_PASSWORD_FILE", raising=False)


def config_of(path: Path, text: str, **options: Any) -> AgentConfig:
    path.write_text(text, encoding="utf-8")
    return config_from(AgentConfig, {**options, "config": str(path)})


def test_every_setting_has_its_name(tmp_path: Path) -> None:
    text = """
        # A comment, and an empty line

        endpoint = ipc:///run/test/agent.sock
        redis-url=rediss://cache:6379/2?ssl_ca_certs=/etc/ca.pem#1
        key-prefix = ours:ä:
        chunk-size-tokens = 512
        pool-bytes = 2GiB
        op-timeout-s = 0.5
        ttl-s = 60
        ttl-refresh = true
        log-level = warning
    """
    assert config_of(tmp_path / "f", text) == AgentConfig(
        endpoint="ipc:///run/test/agent.sock",
        redis_url="rediss://cache:6379/2?ssl_ca_certs=/etc/ca.pem#1",
        key_prefix="ours:ä:".encode(),
        chunk_size_tokens=512,
        pool_bytes=2 << 30,
        op_timeout_s=0.5,
        ttl_s=60,
        ttl_refresh=True,
        log_level="warning",
    )
    # Each name is taken: a value of another kind is what is wrong with these.
    for field in dataclasses.fields(AgentConfig):
        if str(field.type) in ("int", "float", "bool"):
            name = option_name(field.name).removeprefix("--")
            with pytest.raises(ConfigError, match=r"'\?'"):
                config_of(tmp_path / "f", f"{name} = ?")


def test_options_have_precedence(tmp_path: Path) -> None:
    text = "ttl-s = 60\nlog-level = debug\n"
    config = config_of(tmp_path / "f", text, ttl_s=70, log_level=None)
    assert (config.ttl_s, config.log_level) == (70, "debug")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("log-level\n", "line 1 of .*: write NAME = VALUE"),
        (
            "\nlog_level = info\n",
            "line 2 of .*: there is no setting 'log_level': did you mean log",
        ),
        ("redis-password = secret\n", "there is no setting 'redis-password'"),
        (
            "ttl-s = 1\nset-connections = 2\n",
            "line 2 of .*: 'set-connections' is no setting any more: set connections$",
        ),
        (
            "record-size = 1GiB\n",
            "line 1 of .*: 'record-size' is no setting any more: remove the line$",
        ),
        ("config = other\n", "there is no setting 'config'"),
        ("[agent]\n", "write NAME = VALUE"),
        ("ttl-s = 1\nttl-s = 2\n", "line 2 of .*: ttl-s is set twice"),
        ("ttl-s = 1.5\n", "'1.5' is not a whole number"),
        ("op-timeout-s = soon\n", "'soon' is not a number"),
        ("ttl-refresh = yes\n", "'yes' is not true or false"),
        ("pool-bytes = much\n", "line 1 of .*: pool-bytes: 'much' is not a size"),
        ("ttl-s = -1\n", "line 1 of .*: ttl-s is -1: set it to between"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        config_of(tmp_path / "f", text)
    assert "secret" not in str(raised.value)


def test_a_toml_file_is_toml(tmp_path: Path) -> None:
    """Sizes as text or bytes; quoted names; what only looks like a comment in lines."""
    text = """
        #:schema ./agent.schema.json
        redis-url = "rediss://cache:6379/2?ssl_ca_certs=/etc/ca.pem #1"
        key-prefix = 'ours:ä:'
        "chunk-size-tokens" = 512
        pool-bytes = "2GiB"
        slot-bytes = 65_536
        op-timeout-s = 3
        ttl-s = 60
        ttl-refresh = true
        log-level = "warning"  # or debug
    """
    assert config_of(tmp_path / "agent.toml", text, log_level="info") == AgentConfig(
        redis_url="rediss://cache:6379/2?ssl_ca_certs=/etc/ca.pem #1",
        key_prefix="ours:ä:".encode(),
        chunk_size_tokens=512,
        pool_bytes=2 << 30,
        slot_bytes=65_536,
        op_timeout_s=3,
        ttl_s=60,
        ttl_refresh=True,
        log_level="info",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("log-level = debug\n", r"--config .*toml is no TOML: Invalid value \(at line 1"),
        ("ttl-s = 1\nttl-s = 2\n", r"is no TOML: .*line 2"),
        ("\nlog_level = 'info'\n", "line 2 of .*toml: there is no setting 'log_level': did you"),
        ("[agent]\nttl-s = 1\n", "line 1 of .*: there is no setting 'agent'"),
        ("redis-password = 'secret'\n", "there is no setting 'redis-password'"),
        ("ttl-s = 1.5\n", "line 1 of .*: ttl-s is 1.5: set it to a whole number"),
        ("ttl-s = true\n", "line 1 of .*: ttl-s is True: set it to between"),
        ("ttl-refresh = 'yes'\n", "line 1 of .*: ttl-refresh: 'yes' is not true or false"),
        ("ttl-refresh = 1\n", "line 1 of .*: ttl-refresh is 1: write true or false"),
        ("pool-bytes = 'much'\n", "line 1 of .*: pool-bytes: 'much' is not a size"),
        ("pool-bytes = [1]\n", r"line 1 of .*: pool-bytes is \[1\]: set it to between"),
        ("#\n'pool-bytes' = 1\n", "line 2 of .*: pool-bytes is 1: set it to between"),
        ("redis-url = 1979-05-27\n", "line 1 of .*: redis-url is .*1979.*: write text"),
    ],
)
def test_what_a_toml_file_may_not_say(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        config_of(tmp_path / "agent.toml", text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("content", [None, b"\xff = 1"])
def test_what_is_no_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    with pytest.raises(ConfigError, match=r"--config .* cannot be read .*: name another file"):
        config_from(AgentConfig, {"config": str(tmp_path / "f")})


def test_a_gateway_takes_one_too(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("listen = lm://127.0.0.1:7\nmax-connections = 3\n")
    config = config_from(GatewayConfig, {"config": str(tmp_path / "f")})
    assert (config.listen, config.max_connections) == ("lm://127.0.0.1:7", 3)
