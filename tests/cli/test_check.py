# SPDX-License-Identifier: Apache-2.0
"""`--check`: what it finds in settings and files, and that it leaves everything as it is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from lmcache_redis.cli.checked import _check_disk
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import ConfigError
from lmcache_redis.sources import config_from
from tests.cli.test_admin import one_sentence, run
from tests.servers import RedisServer

pytestmark = pytest.mark.servers


def test_good_settings_are_shown_and_nothing_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://:secret@127.0.0.1:{server.getsockname()[1]}"
        path, copy = tmp_path / "agent.conf", tmp_path / "copy.conf"
        path.write_text(f"pool-bytes = 64MiB # small\ndisk-path = {tmp_path}/disk\nttl-s = 5\n")
        words = ("agent", "--config", str(path), "--endpoint", f"ipc://{tmp_path}/run/agent.sock")
        variables = {
            "LMCACHE_REDIS_URL": url,
            "LMCACHE_REDIS_TTL_S": "60",
            "LMCACHE_REDIS_POOL_BYTE": "1",
            "LMCACHE_REDIS_METRICS_PORT": "tcp://10.0.0.1:9464",  # of a Kubernetes service
        }
        done = run(*words, "--check", **variables)
        out, err = done.stdout, done.stderr
        assert (done.returncode, "secret" in out) == (0, False)
        assert f"pool-bytes = 64MiB  # line 1 of {path}: pool-bytes\n" in out
        assert "ttl-s = 60  # LMCACHE_REDIS_TTL_S\n" in out
        (line,) = err.splitlines()
        assert line.endswith(
            "LMCACHE_REDIS_POOL_BYTE sets nothing: did you mean LMCACHE_REDIS_POOL_BYTES?"
        )
        # It can be a file: beside the URL, which may hold a password.
        copy.write_text("".join(each for each in out.splitlines(True) if "redis-url" not in each))
        config = config_from(AgentConfig, {"config": str(copy)})
        assert (config.pool_bytes, config.ttl_s) == (64 << 20, 60)

        found = json.loads(run(*words, "--check", "--json", **variables).stdout)
        shown = {"name": "pool-bytes", "value": "64MiB", "from": f"line 1 of {path}: pool-bytes"}
        assert shown in found["settings"]
        assert len(found["warnings"]) == 1
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert {each.name for each in tmp_path.iterdir()} == {"agent.conf", "copy.conf"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("agent --ttl-s -1", "--ttl-s is -1: set it to between"),
        ("agent --redis-url tcp://x", "the Redis URL must begin with redis://"),
        ("agent --seal-key-file nowhere", "--seal-key-file nowhere cannot be read"),
        ("agent --config nowhere", "--config nowhere cannot be read (No such file or directory)"),
        ("agent --disk-path /etc/passwd", "--disk-path /etc/passwd cannot be used: "),
        ("agent --redis-url redis://x --redis-password-file no", "the password file no cannot be"),
        ("agent --endpoint ipc:///tmp/agent.sock", "/tmp: run `chmod 700 /tmp`|others can enter"),
        ("gateway --tls-cert no.pem", "--tls-cert no.pem cannot be used (No such file or"),
    ],
)
def test_what_has_to_change_is_one_sentence(words: str, sentence: str) -> None:
    line = one_sentence(run(*words.split(), "--check"), 2)
    assert any(each in line for each in sentence.split("|")), line


def test_the_server_is_asked_only_if_that_is_wanted(tmp_path: Path) -> None:
    words = ("agent", "--check", "--connect", "--redis-url")
    with RedisServer(tmp_path) as server:
        assert run(*words, server.unix_url).returncode == 0
    assert "nowhere.sock" in one_sentence(run(*words, "unix:///nowhere.sock"), 1)


def test_a_disk_path_that_this_user_may_not_look_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /root/cache/chunks is for other users, for whom `Path.exists` raises."""

    def hidden(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", hidden)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} is no directory, or cannot be written to"):
        _check_disk(tmp_path / "cache" / "chunks")


def test_more_memory_than_there_is_is_a_warning() -> None:
    done = run("agent", "--check", "--pool-bytes", "1PiB")
    assert done.returncode == 0
    assert "--pool-bytes is 1PiB, but this process may use" in done.stderr
