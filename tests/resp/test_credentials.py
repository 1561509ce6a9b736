# SPDX-License-Identifier: Apache-2.0
"""User and password are asked for at each connect: they may change while a plane runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider

from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import ConfigError, RedisAuthError
from lmcache_redis.resp import RedisOptions, check_url, health
from lmcache_redis.resp.net.endpoint import auth_command
from lmcache_redis.resp.options import PasswordFile, StaticPassword, load_provider
from tests.resp.helpers import Chunk, check_moves, running, wait_until
from tests.servers import RedisServer

# Until it is noticed that connections were closed.
QUICK = {"heartbeat_s": 0.1}


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_REFUSED_RETRY_S", 0.05)


class Rotating(CredentialProvider):
    """What a test wants it to say."""

    def __init__(self) -> None:
        self.said: object = ("cache", "first")
        self.asked = 0

    def get_credentials(self) -> tuple[str, ...]:
        self.asked += 1
        if isinstance(self.said, Exception):
            raise self.said
        return self.said  # type: ignore[return-value]


def rotate(server: RedisServer, password: str) -> None:
    """Give the user another password, and close its connections."""
    server.command("ACL", "SETUSER", "cache", "on", "resetpass", f">{password}", "~*", "+@all")
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def chunk(number: int) -> Chunk:
    return Chunk(number, 20_000, 10_000, seed=number)


@pytest.mark.servers
def test_a_password_file_is_read_at_each_connect(own_server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("first\n")
    rotate(own_server, "first")
    with running(own_server.url, username="cache", password_file=str(path), **QUICK) as plane:
        check_moves(plane, chunk(1))
        connects = plane.stats().connects
        rotate(own_server, "second")
        wait_until(lambda: "refuses the user or the password" in plane.state.reason)
        path.write_text("second\n")
        wait_until(lambda: plane.state.up)
        check_moves(plane, chunk(2))
        assert plane.stats().connects > connects
        path.unlink()
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        wait_until(lambda: f"{path} cannot be read" in plane.state.reason)
        path.write_text("second")
        wait_until(lambda: plane.state.up)


@pytest.mark.servers
def test_a_provider_is_asked_at_each_connect(own_server: RedisServer) -> None:
    provider = Rotating()
    rotate(own_server, "first")
    with running(own_server.url, credential_provider=provider, **QUICK) as plane:
        check_moves(plane, chunk(1))
        asked = provider.asked
        provider.said = ("cache", "second")
        # A new password leaves the connections alone.
        own_server.command("ACL", "SETUSER", "cache", "resetpass", ">second")
        check_moves(plane, chunk(2))
        assert provider.asked == asked
        rotate(own_server, "second")
        check_moves(plane, chunk(3))
        assert provider.asked > asked
        provider.said = OSError("no token today")
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        wait_until(lambda: "provider failed: OSError: no token today" in plane.state.reason)
        provider.said = ("cache", "second")
        wait_until(lambda: plane.state.up)
        check_moves(plane, chunk(4))


@pytest.mark.parametrize(
    ("said", "expected"),
    [(("p",), ("AUTH", "p")), (("u", "p"), ("AUTH", "u", "p")), (["u", "p"], ("AUTH", "u", "p"))],
)
def test_what_a_provider_says(said: object, expected: tuple[str, ...]) -> None:
    provider = Rotating()
    provider.said = said
    assert auth_command(provider) == expected


@pytest.mark.parametrize("said", [(), ("a", "b", "c"), ("a", None), (b"p",), None, "password", 5])
def test_what_a_provider_may_not_say(said: object) -> None:
    provider = Rotating()
    provider.said = said
    with pytest.raises(RedisAuthError, match=r"neither \(password,\) nor \(user, password\)"):
        auth_command(provider)


def test_no_credentials() -> None:
    assert auth_command(None) is None
    assert auth_command(StaticPassword(None, "p")) == ("AUTH", "p")
    assert auth_command(UsernamePasswordCredentialProvider("u", "p")) == ("AUTH", "u", "p")
    assert "p" not in repr(StaticPassword(None, "p")).partition("(")[2].replace("username=", "")


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), (b"", "empty"), (b"\n", "empty"), (b"\xff", "UTF")],
)
def test_a_file_without_a_password(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RedisAuthError, match=says):
        PasswordFile(None, str(path)).get_credentials()
    with pytest.raises(ConfigError, match=says):
        check_url(RedisOptions("redis://h", password_file=str(path)))


def test_one_source_of_user_and_password(tmp_path: Path) -> None:
    for given in ({"username": "u"}, {"password": "p"}, {"password_file": str(tmp_path)}):
        with pytest.raises(ConfigError, match="give neither"):
            check_url(RedisOptions("redis://h", credential_provider=Rotating(), **given))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give neither"):
        check_url(RedisOptions("redis://u:p@h", credential_provider=Rotating()))


def test_a_provider_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens_of_a_test.py").write_text(
        "class Provider:\n"
        "    def get_credentials(self):\n        return ('me', 'token')\n"
        "class Namespace:\n    Provider = Provider\n"
        "def broken():\n    raise RuntimeError('no cloud here')\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("Provider", "Namespace.Provider"):
        config = AgentConfig(redis_credential_provider=f"tokens_of_a_test:{name}")
        options = RedisOptions.of_agent(config, "redis://h")
        assert auth_command(options.credential_provider) == ("AUTH", "me", "token")
    for name, says in (
        ("broken", "RuntimeError: no cloud here"),
        ("nothing", "no get_credentials"),
        ("missing", "AttributeError"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_provider(f"tokens_of_a_test:{name}")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        load_provider("no_such_module_of_a_test:X")
    for wrong in ("tokens_of_a_test", ":X", "x:"):
        with pytest.raises(ConfigError, match="write PACKAGE"):
            load_provider(wrong)
    del sys.modules["tokens_of_a_test"]
