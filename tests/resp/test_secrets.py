# SPDX-License-Identifier: Apache-2.0
"""A password, wherever it comes from, stays out of logs, answers, errors and process lists."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import forks
from tests.harness import AgentServer
from tests.servers import RedisServer

USER = "cache"
SECRET = "pa55:w/o@rd"
ESCAPED = "pa55%3Aw%2Fo%40rd"
VARIABLES = ("LMCACHE_REDIS_URL", "LMCACHE_REDIS_PASSWORD", "LMCACHE_REDIS_PASSWORD_FILE")
SOURCES = ("command line", "url", "variable", "file")


@pytest.fixture
def guarded(own_server: RedisServer) -> RedisServer:
    """A server that lets nobody in but USER with SECRET."""
    own_server.command("ACL", "SETUSER", USER, "on", f">{SECRET}", "~*", "+@all")
    own_server.command("ACL", "SETUSER", "default", "off")
    return own_server


def give(
    source: str, url: str, password: str, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> dict[str, str]:
    """Put URL and password where `source` says; what is left for the command line."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    whole = url.replace("//", f"//{USER}:{password.replace(SECRET, ESCAPED)}@")
    if source == "command line":
        return {"redis_url": whole}
    if source == "url":
        monkeypatch.setenv("LMCACHE_REDIS_URL", whole)
        return {}
    if source == "variable":
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD", password)
    else:
        path = directory / "password"
        path.write_text(password + "\n")
        monkeypatch.setenv("LMCACHE_REDIS_PASSWORD_FILE", str(path))
    monkeypatch.setenv("LMCACHE_REDIS_URL", url)
    return {"redis_username": USER}


def agent_with(directory: Path, options: dict[str, str]) -> AgentServer:
    url = options.pop("redis_url", None)
    return AgentServer(directory / "agent", url, log_level="debug", **options)


def shown(agent: AgentServer) -> str:
    """All that an agent tells: its log, its status in every form, its processes."""
    told = [agent.log, json.dumps(agent.status())]
    for words in (["status"], ["status", "--json"]):
        done = forks.run([*words, "--endpoint", agent.endpoint], os.environ, 60.0)
        told += [done.stdout, done.stderr]
    for process in [agent.pid, *agent.children()]:
        told.append(Path(f"/proc/{process}/cmdline").read_bytes().decode())
        told.append(Path(f"/proc/{process}/comm").read_text())
    return "\n".join(told)


def check_untold(text: str) -> None:
    for piece in (SECRET, ESCAPED, SECRET.partition(":")[2], "pa55"):
        assert piece not in text


WRONG = [("command line", "x"), ("file", "x")]


@pytest.mark.parametrize(("source", "end"), [*((source, "") for source in SOURCES), *WRONG])
def test_a_password_is_never_shown(
    guarded: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, end: str
) -> None:
    options = give(source, guarded.url, SECRET + end, monkeypatch, tmp_path)
    with agent_with(tmp_path, options) as agent:
        report = agent.status()["redis"]
        assert report["up"] is not bool(end)
        assert not end or "password" in report["reason"]
        check_untold(shown(agent))
        # Nor when the server goes away.
        guarded.kill()
        check_untold(shown(agent))


@pytest.mark.servers
@pytest.mark.parametrize(
    "url",
    [
        f"redis://{USER}:{SECRET}@127.0.0.1:6379",  # not escaped: a port of letters
        f"redis://{USER}:{ESCAPED}@127.0.0.1:port",
        f"rediss://{USER}:{ESCAPED}@h?ssl_ca_certs=/no/such/file",
        f"http://{USER}:{ESCAPED}@h",
    ],
)
def test_a_url_that_cannot_be_used_is_not_quoted(tmp_path: Path, url: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    words = ["agent", "--endpoint", f"ipc://{tmp_path}/agent.sock", "--pool-bytes", "16MiB"]
    tmp_path.chmod(0o700)
    done = forks.run(words, environment | {"LMCACHE_REDIS_URL": url}, 60.0)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
    check_untold(done.stdout + done.stderr)
