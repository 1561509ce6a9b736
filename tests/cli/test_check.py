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
from tests import forks
from tests.servers import RedisServer

pytestmark = pytest.mark.servers


def check(*words: str, **environment: str) -> tuple[int, str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LMCACHE_REDIS_")}
    done = forks.run([*words, "--check"], {**kept, **environment}, 30)
    return done.returncode, done.stdout, done.stderr


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
        status, out, err = check(*words, **variables)
        assert (status, "secret" in out) == (0, False)
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

        status, out, _ = check(*words, "--json", **variables)
        found = json.loads(out)
        assert {
            "name": "pool-bytes",
            "value": "64MiB",
            "from": f"line 1 of {path}: pool-bytes",
        } in (found["settings"])
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
    status, out, err = check(*words.split())
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert any(each in line for each in sentence.split("|")), line


def test_the_server_is_asked_only_if_that_is_wanted(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert check("agent", "--redis-url", server.unix_url, "--connect")[0] == 0
    status, out, err = check("agent", "--redis-url", "unix:///nowhere.sock", "--connect")
    assert (status, out) == (1, "")
    assert "nowhere.sock" in err


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
    status, _, err = check("agent", "--pool-bytes", "1PiB")
    assert status == 0
    assert "--pool-bytes is 1PiB, but this process may use" in err
