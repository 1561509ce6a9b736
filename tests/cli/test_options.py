# SPDX-License-Identifier: Apache-2.0
"""Settings of the agent as options, variables and lines of a file, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_redis.agent import main as agent_main
from lmcache_redis.cli.app import app
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.options import StaticPassword, parse_deployment
from lmcache_redis.settings import option_name, settings_of
from lmcache_redis.sources import config_from, misspelt_variables

PASSWORD = "LMCACHE_REDIS_PASSWORD"
PROVIDER = "LMCACHE_REDIS_CREDENTIAL_PROVIDER"


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PASSWORD, f"{PASSWORD}_FILE", PROVIDER, "LMCACHE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AgentConfig]:
    """Configs of agents that were started, in name only."""
    configs: list[AgentConfig] = []

    def run_agent(config: AgentConfig, again: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(agent_main, "run_agent", run_agent)
    return configs


def options_of_tools() -> RedisOptions:
    return RedisOptions.of_settings(config_from(AgentConfig, {}), "redis://h")


def run(*words: str, env: dict[str, str] | None = None) -> int:
    result = CliRunner().invoke(app, ["agent", *words], env=env, catch_exceptions=False)
    return result.exit_code


# Each setting: how it is written, and what that means where it is not the text itself.
WRITTEN: dict[str, tuple[str, object]] = {
    "key_prefix": ("ours:ä:", "ours:ä:".encode()),
    "pool_bytes": ("2GiB", 2 << 30),
    "slot_bytes": ("512KiB", 512 << 10),
    "write_queue_bytes": ("100MB", 100_000_000),
    "warm_bytes": ("1GiB", 1 << 30),
    "disk_size": ("10GiB", 10 << 30),
    "embedded_memory_bytes": ("1GiB", 1 << 30),
    "lookup_deadline_s": ("0.5", 0.5),
    "op_timeout_s": ("2", 2.0),
    "shutdown_deadline_s": ("1.5", 1.5),
    "chunk_size_tokens": ("512", 512),
    "connections": ("3", 3),
    "network_threads": ("2", 2),
    "ttl_s": ("3600", 3600),
    "copy_threads": ("4", 4),
    "canary_every": ("50", 50),
    "store_after": ("2", 2),
    "direct_copy_bytes": ("4096", 4096),
}
TEXTS = {
    "endpoint": "ipc:///run/test/agent.sock",
    "redis_url": "rediss://cache:6379/2?ssl_ca_certs=/etc/ca.pem#1",
    "redis_username": "someone",
    "redis_password_file": "/run/secrets/password",
    "redis_credential_provider": "cloud.tokens:Provider",
    "seal_key_file": "/etc/lmcache/seal.keys",
    "compress": "lossless",
    "disk_path": "/var/cache/lmcache",
    "tenant_bytes": "team=1GiB,*=5MB",
    "batch_copies": "off",
    "log_level": "warning",
    "log_format": "json",
    "metrics": "[::1]:9464",
    "record": "/var/tmp/requests.jsonl",
}
FLAGS = {"ttl_refresh", "expose_requests"}
VALUES = TEXTS | {name: text for name, (text, _) in WRITTEN.items()}
_MEANT: dict[str, Any] = {**TEXTS, **{name: value for name, (_, value) in WRITTEN.items()}}
MEANT = AgentConfig(**_MEANT, **dict.fromkeys(FLAGS, True))


def test_without_options_the_defaults_hold(started: list[AgentConfig]) -> None:
    assert run() == 0
    assert started == [AgentConfig()]


def test_every_setting_has_its_option(started: list[AgentConfig]) -> None:
    words = [word for name, value in VALUES.items() for word in (option_name(name), value)]
    assert run(*words, "--ttl-refresh", "--expose-requests") == 0
    assert started == [MEANT]
    secrets = {"redis_password", "redis_sentinel_password"}
    assert settings_of(AgentConfig).keys() - VALUES.keys() == secrets | FLAGS


def test_an_option_may_be_given_again(started: list[AgentConfig]) -> None:
    assert run("--tenant-bytes", "team=1GiB", "--tenant-bytes", "*=5MB") == 0
    assert started == [AgentConfig(tenant_bytes="team=1GiB,*=5MB")]


def test_every_setting_has_its_variable(started: list[AgentConfig]) -> None:
    known = settings_of(AgentConfig)
    variables = {known[name].variable: value for name, value in VALUES.items()}
    assert run(env={**variables, **{known[name].variable: "true" for name in FLAGS}}) == 0
    assert started == [MEANT]


def test_every_setting_has_its_line(started: list[AgentConfig], tmp_path: Path) -> None:
    path = tmp_path / "agent.conf"
    lines = [f"{option_name(name)[2:]} = {value} # why" for name, value in VALUES.items()]
    lines += ["", "  # A comment", "  ttl-refresh=true", "expose-requests = true"]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert run("--config", str(path)) == 0
    assert run(env={"LMCACHE_REDIS_CONFIG": str(path)}) == 0
    assert started == [MEANT, MEANT]


def test_options_precede_variables_and_those_the_file(
    started: list[AgentConfig], tmp_path: Path
) -> None:
    path = tmp_path / "agent.conf"
    path.write_text("ttl-s = 1\nttl-refresh = true\nconnections = 3\n")
    words = ("--config", str(path))
    run(*words)
    run(*words, env={"LMCACHE_REDIS_TTL_S": "2", "LMCACHE_REDIS_CONNECTIONS": ""})
    run(*words, "--ttl-s", "3", "--no-ttl-refresh", env={"LMCACHE_REDIS_TTL_S": "2"})
    assert [(c.ttl_s, c.ttl_refresh, c.connections) for c in started] == [
        (1, True, 3),
        (2, True, 3),
        (3, False, 3),
    ]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("pool_bytes", "12x", ": '12x' is not a size"),
        ("ttl_s", "1.5", ": '1.5' is not a whole number"),
        ("ttl_s", "-1", " is -1: set it to between 0 and 316224000"),
        ("disk_size", "1", " is 1: set it to between 1MiB and 1EiB"),
        ("batch_copies", "no", " is 'no': choose one of auto, off"),
        ("metrics", "9464", " is '9464': write ADDRESS:PORT"),
        ("endpoint", "tcp://127.0.0.1:1", " tcp://127.0.0.1:1: tcp:// is not served"),
        ("ttl_refresh", "true", " needs a --ttl-s: set that as well"),
    ],
)
def test_an_error_begins_with_the_place_that_has_to_change(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting, path = settings_of(AgentConfig)[name], tmp_path / "agent.conf"
    path.write_text(f"# first\n{setting.option[2:]} = {value}\n")
    where = f"line 2 of {path}: {setting.option[2:]}"
    for place, options in ((setting.option, {name: value}), (where, {"config": str(path)})):
        with pytest.raises(ConfigError) as refused:
            config_from(AgentConfig, options)
        assert str(refused.value).startswith(place + problem)
    monkeypatch.setenv(setting.variable, value)
    with pytest.raises(ConfigError) as refused:
        config_from(AgentConfig, {})
    assert str(refused.value).startswith(setting.variable + problem)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("LMCACHE_REDIS_POOL_BYTE", "sets nothing: did you mean LMCACHE_REDIS_POOL_BYTES?"),
        ("LMCACHE_REDIS_REDIS_PASSWORD", "sets nothing: did you mean LMCACHE_REDIS_PASSWORD?"),
        # Of earlier versions.
        ("LMCACHE_REDIS_GET_CONNECTIONS", "sets nothing any more: set LMCACHE_REDIS_CONNECTIONS"),
        ("LMCACHE_REDIS_DEVICE", "sets nothing any more: unset it"),
        ("LMCACHE_REDIS_ENGINE_ID", ""),
        ("LMCACHE_REDIS_DEVICES", ""),
        ("LMCACHE_REDIS_METRICS_SERVICE_HOST", ""),
        ("LMCACHE_REDIS_METRICS_PORT_9464_TCP", ""),
    ],
)
def test_variables_that_set_nothing_are_named(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch, started: list[AgentConfig]
) -> None:
    monkeypatch.setenv(variable, "1")
    found = [each for each in misspelt_variables(AgentConfig) if each.startswith(variable)]
    assert found == ([f"{variable} {said}"] if said else [])
    assert run() == 0
    assert started == [AgentConfig()]


def test_a_password_comes_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("sécret word\n", encoding="utf-8")
    monkeypatch.setenv(f"{PASSWORD}_FILE", str(path))
    config = config_from(AgentConfig, {"redis_url": "redis://h", "redis_username": "me"})
    assert config.redis_password_file == str(path)
    options = RedisOptions.of_agent(config, "redis://h")
    credentials = parse_deployment(options).server.credentials
    assert credentials is not None
    assert credentials.get_credentials() == ("me", "sécret word")
    path.write_text("another")
    assert credentials.get_credentials() == ("me", "another")
    monkeypatch.setenv(PASSWORD, "the variable wins")
    options = options_of_tools()
    assert parse_deployment(options).server.credentials == StaticPassword(None, "the variable wins")


def test_every_command_takes_a_credential_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER, "redis.credentials:UsernamePasswordCredentialProvider")
    options = options_of_tools()
    assert type(options.credential_provider).__name__ == "UsernamePasswordCredentialProvider"
    monkeypatch.setenv(PROVIDER, "redis.credentials:Missing")
    with pytest.raises(ConfigError, match=r"redis\.credentials:Missing cannot be made"):
        options_of_tools()


# ------------------------------------------------------------------- files


def config_of(path: Path, text: str, **options: Any) -> AgentConfig:
    path.write_text(text, encoding="utf-8")
    return config_from(AgentConfig, {**options, "config": str(path)})


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
        ("op-timeout-s = soon\n", "'soon' is not a number"),
        ("ttl-refresh = yes\n", "'yes' is not true or false"),
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
