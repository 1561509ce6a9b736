# SPDX-License-Identifier: Apache-2.0
"""Settings: what is accepted, what is refused, and what the sentence says."""

from __future__ import annotations

import dataclasses
import re
import stat
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import lmcache_redis
from lmcache_redis.cli.size import Compress
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import (
    COMPRESSIONS,
    DEFAULT_SLOT_BYTES,
    ENDPOINT_VARIABLE,
    SEAL_KEY_FILE_VARIABLE,
    AgentConfig,
    ClientConfig,
    TierSettings,
    default_endpoint,
    ensure_private,
    private_directory,
    tools_endpoint,
    why_unsafe,
)
from lmcache_redis.errors import ConfigError
from lmcache_redis.regions import DoorSettings
from lmcache_redis.settings import (
    format_size,
    json_schema,
    markdown_list,
    option_name,
    parse_size,
    settings_of,
)
from lmcache_redis.sources import config_from

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (" 12 ", 12),
        ("1k", 1024),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("4 GiB", 4 << 30),
        ("1.5G", 3 << 29),
        ("512MB", 512_000_000),
        ("2TB", 2_000_000_000_000),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text, "--x") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 potatoes", "1e9", "4GiB2", "0x10", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--x: .* is not a size: write it as 4GiB, 512MB"):
        parse_size(text, "--x")


@pytest.mark.parametrize("size_bytes", [1, 1000, 1024, 1020 << 10, 3 << 29, 4 << 30, 1 << 60])
def test_sizes_are_written_so_that_they_can_be_read(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes), "--x") == size_bytes


def test_the_defaults_are_possible_and_leave_room() -> None:
    config = AgentConfig()
    assert config.pool_bytes <= 4 << 30
    assert config.embedded_memory_bytes <= 8 << 30
    assert config.write_queue_limit_bytes == config.pool_bytes // 2
    assert config.chunk_size_tokens == 256
    # A value of Redis is the payload and a header of 512 bytes: just under 1 MiB.
    assert config.slot_bytes + 512 < MIB


def test_a_config_never_shows_a_password() -> None:
    config = AgentConfig(redis_url="redis://user:in-the-url@cache", redis_password="in-the-field")
    assert "in-the-url" not in repr(config)
    assert "in-the-field" not in repr(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size_tokens", 0),
        ("chunk_size_tokens", -256),
        ("chunk_size_tokens", True),
        ("chunk_size_tokens", "256"),
        ("slot_bytes", 4095),
        ("pool_bytes", 0),
        ("pool_bytes", 1 << 51),
        ("embedded_memory_bytes", 1000),
        ("write_queue_bytes", -1),
        ("lookup_deadline_s", 0),
        ("lookup_deadline_s", float("nan")),
        ("op_timeout_s", float("inf")),
        ("op_timeout_s", -1.0),
        ("shutdown_deadline_s", -1),
        ("connections", 0),
        ("connections", 65),
        ("copy_threads", 0),
        ("log_level", "loud"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        AgentConfig(**{name: value})
    said = str(caught.value)
    assert option_name(name) in said
    shown = format_size(value) if name.endswith("_bytes") else repr(value)
    assert f" is {shown}: " in said
    assert "set it to between" in said or "choose one of" in said


def test_bounds_are_shown_as_they_can_be_written() -> None:
    for given, said in (
        ({"slot_bytes": 1 << 30}, "--slot-bytes is 1GiB: set it to between 4KiB and 512MiB"),
        ({"op_timeout_s": 0}, "--op-timeout-s is 0: set it to between 0.01 and 600"),
        ({"ttl_s": -1}, "--ttl-s is -1: set it to between 0 and 316224000"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}$"):
            AgentConfig(**given)


def test_a_host_pool_has_room_for_a_slot() -> None:
    for slot, pool, says in (
        (128 * MIB, 128 * MIB, "--slot-bytes is 128MiB, and --pool-bytes 128MiB: the pool must"),
        (128 * MIB, 100_000_000, "--slot-bytes is 128MiB, and --pool-bytes 100000000: the pool"),
        (DEFAULT_SLOT_BYTES, 512 << 10, "--pool-bytes is 512KiB, and --slot-bytes 1020KiB: the "),
    ):
        with pytest.raises(ConfigError, match=f"^{says}.*hold a slot, and 4KiB more$"):
            AgentConfig(pool_bytes=pool, slot_bytes=slot)
    AgentConfig(pool_bytes=MIB + 4096, slot_bytes=MIB)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "agent.sock",
        "/run/agent.sock",
        "ipc://agent.sock",
        "ipc:///" + "x" * 100,
        "tcp://127.0.0.1:7000",
        "tcp://localhost:1",
        "tcp://[::1]:65535",
        "tcp://*:7000",
        "udp://127.0.0.1:7000",
    ],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    for config in (AgentConfig, ClientConfig):
        with pytest.raises(ConfigError, match="endpoint") as refused:
            config(endpoint=endpoint)
        if endpoint.startswith("tcp:"):
            assert re.search("any user of the machine.*write ipc://PATH", str(refused.value))


@pytest.mark.parametrize("session", [{}, {"XDG_RUNTIME_DIR": "/x", "TMPDIR": "/y", "HOME": "/z"}])
def test_the_default_endpoint_does_not_depend_on_the_login(
    monkeypatch: pytest.MonkeyPatch, session: dict[str, str]
) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME", ENDPOINT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in session.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    assert private_directory() == Path("/tmp/lmcache-redis-4711")
    assert default_endpoint() == "ipc:///tmp/lmcache-redis-4711/agent.sock"
    assert AgentConfig().endpoint == ClientConfig().endpoint == default_endpoint()


def test_a_service_managers_directory_is_taken_if_it_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lmcache_redis.config._SERVICE_DIRECTORY", tmp_path)
    assert private_directory() == tmp_path
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert private_directory() != tmp_path


def test_roots_tools_find_the_agent_of_a_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of another user. Root's own agent comes first, and a variable before both."""
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setattr("lmcache_redis.config._SERVICE_DIRECTORY", tmp_path / "service")
    monkeypatch.setattr("lmcache_redis.config.private_directory", lambda: tmp_path / "own")
    of_service, own = (f"ipc://{tmp_path}/{each}/agent.sock" for each in ("service", "own"))
    for each in ("service", "own"):
        (tmp_path / each).mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert tools_endpoint() == own
    (tmp_path / "service" / "agent.sock").touch()
    assert tools_endpoint() == of_service
    assert AgentConfig().endpoint == ClientConfig().endpoint == own
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    assert tools_endpoint() == own
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "own" / "agent.sock").touch()
    assert tools_endpoint() == own
    (tmp_path / "own" / "agent.sock").unlink()
    monkeypatch.setenv(ENDPOINT_VARIABLE, "ipc:///run/x/agent.sock")
    assert tools_endpoint() == "ipc:///run/x/agent.sock"


def test_the_endpoints_variable_holds_for_agent_and_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "ipc:///run/x/agent.sock")
    assert AgentConfig().endpoint == ClientConfig().endpoint == "ipc:///run/x/agent.sock"
    assert ClientConfig.from_extra_config({}).endpoint == "ipc:///run/x/agent.sock"
    config = ClientConfig.from_extra_config({"endpoint": "ipc:///y/z", "agent_dead_after_s": 3})
    assert (config.endpoint, config.agent_dead_after_s) == ("ipc:///y/z", 3)


def test_the_endpoints_directory_is_made_private(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    ensure_private(directory)
    ensure_private(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=f"run `chmod 700 {directory}`"):
        ensure_private(directory)


def test_the_rights_of_a_directory_that_others_need_stay(tmp_path: Path) -> None:
    """Closed to others, /tmp or a home would be of no use."""
    sticky, filled = tmp_path / "sticky", tmp_path / "filled"
    for each, mode in ((sticky, 0o1777), (filled, 0o755)):
        each.mkdir()
        each.chmod(mode)
    (filled / "file").touch()
    for each in (sticky, filled):
        with pytest.raises(ConfigError, match=f"below it, ipc://{each}/lmcache/agent.sock") as said:
            ensure_private(each)
        assert "chmod" not in str(said.value)
        ensure_private(each / "lmcache")
    assert "chmod" not in str(why_unsafe(sticky))


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "foreign"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="does not belong to this user"):
        ensure_private(directory)


def test_a_link_is_no_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="does not belong to this user"):
        ensure_private(link)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --endpoint"):
        ensure_private(tmp_path / "file" / "below")


def test_unknown_settings_of_an_engine_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ClientConfig.from_extra_config({"endpiont": "ipc:///x", "host": "y"})
    assert "endpiont, host" in str(caught.value)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(ClientConfig))


@pytest.mark.parametrize(
    "extra",
    [
        {"endpoint": None},
        {"endpoint": 7},
        {"agent_dead_after_s": "2"},
        {"agent_dead_after_s": True},
        {"agent_dead_after_s": 0},
        {"kv_cache_layout": "LBNHC"},
        {"kv_cache_layout": ["BLNHC"]},
        {"share_across_tp": "yes"},
        {"share_across_versions": 1},
        {"kv_shares": 8},  # without share_across_tp
    ],
)
def test_impossible_settings_of_an_engine_are_refused(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ConfigError, match=name.replace("_", "[-_]")):
        ClientConfig.from_extra_config(extra)


def test_the_number_of_shares_is_bounded() -> None:
    config = ClientConfig.from_extra_config({"share_across_tp": True, "kv_shares": 16})
    assert (config.share_across_tp, config.kv_shares) == (True, 16)
    for number in (0, 256, 2.5, "8 shares"):
        with pytest.raises(ConfigError, match=r"kv[-_]shares"):
            ClientConfig.from_extra_config({"share_across_tp": True, "kv_shares": number})


@pytest.mark.parametrize("config", [AgentConfig, GatewayConfig, ClientConfig])
def test_every_setting_is_read(config: type[Any]) -> None:
    package = Path(lmcache_redis.__file__).parent
    paths = [path for path in package.rglob("*.py") if path != package / "config.py"]
    source = "".join(path.read_text() for path in paths)
    # Read through a property of the config.
    others = {"write_queue_bytes": "write_queue_limit_bytes"}
    names = {name: others.get(name, name) for name in settings_of(config)}
    assert [n for n, read in names.items() if not re.search(rf"\.{read}\b", source)] == []


def test_one_list_of_compressions() -> None:
    """Those of agents are those of `size` and, as far as they are told, of doors."""
    of_doors = get_type_hints(DoorSettings)["compress"]
    assert [each.value for each in Compress] == [*get_args(of_doors)] == [*COMPRESSIONS]


@pytest.mark.parametrize("config", [AgentConfig, GatewayConfig, ClientConfig])
def test_every_setting_explains_itself(config: type[Any]) -> None:
    for each in settings_of(config).values():
        assert len(each.help) > 10, each.name
        assert each.shown_default, each.name
        assert each.kind in ("int", "float", "bool", "str", "bytes"), each.name
        # A number has bounds: no text is taken for granted.
        assert (each.between is not None) == (each.kind in ("int", "float")), each.name


@pytest.mark.parametrize("config", [AgentConfig, GatewayConfig])
def test_defaults_and_bounds_can_be_written_as_shown(config: type[Any]) -> None:
    defaults = config()
    for each in settings_of(config).values():
        shown = [getattr(defaults, each.name), *(each.between or ()), *each.choices]
        for value in shown:
            if value not in (None, b""):
                assert each.parse(each.write(value)) == value, each.name


def test_no_two_settings_share_a_variable() -> None:
    of_tiers = set(settings_of(TierSettings))
    for config in (AgentConfig, GatewayConfig):
        variables = [each.variable for each in settings_of(config).values()]
        assert len(variables) == len(set(variables))
    agent, gateway = settings_of(AgentConfig), settings_of(GatewayConfig)
    assert agent.keys() & gateway.keys() == of_tiers
    assert agent["pool_bytes"].variable == "LMCACHE_REDIS_POOL_BYTES"
    assert agent["redis_url"].variable == "LMCACHE_REDIS_URL"
    assert agent["endpoint"].variable == ENDPOINT_VARIABLE
    assert agent["seal_key_file"].variable == SEAL_KEY_FILE_VARIABLE


@pytest.mark.parametrize(("of", "config"), [("agent", AgentConfig), ("engine", ClientConfig)])
def test_the_page_of_settings_has_them_all(of: str, config: type[Any]) -> None:
    page = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"
    assert markdown_list(config, of == "engine") in page.read_text(), (
        f"a list in {page} is not that of the code; print it with "
        f"`lmcache-redis settings --of {of} --markdown`"
    )


def test_documents_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [(markdown_list(c), json_schema(c)) for c in (AgentConfig, GatewayConfig)]
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 15)
    monkeypatch.setattr("os.cpu_count", lambda: 1000)
    monkeypatch.setenv(ENDPOINT_VARIABLE, "ipc:///elsewhere/agent.sock")
    assert [(markdown_list(c), json_schema(c)) for c in (AgentConfig, GatewayConfig)] == before


def test_the_schema_has_every_setting_and_no_secret() -> None:
    schema = json_schema(AgentConfig)
    names = {each.option[2:] for each in settings_of(AgentConfig).values() if not each.secret}
    assert set(schema["properties"]) == names
    assert "redis-password" not in names
    # A password on a command line can be read by everybody on the machine.
    text = markdown_list(AgentConfig)
    assert "`--redis-password`" not in text
    assert "`LMCACHE_REDIS_PASSWORD`" in text
    assert schema["additionalProperties"] is False
    reloadable = {n for n, each in schema["properties"].items() if each.get("x-reloadable")}
    assert {"log-level", "disk-size"} <= reloadable < names


def test_a_variable_that_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Secret does that was made from a file: the end is no part of a password."""
    monkeypatch.setenv("LMCACHE_REDIS_USERNAME", "agent\n")
    monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", " s3cr3t \r\n")
    monkeypatch.setenv("LMCACHE_REDIS_SENTINEL_PASSWORD", "\n")
    config = config_from(AgentConfig, {"redis_url": "redis://h"})
    assert (config.redis_username, config.redis_password) == ("agent", " s3cr3t ")
    assert config.redis_sentinel_password is None
