"""`lmcache-redis bench` against real servers: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import RedisServer, free_port

pytestmark = pytest.mark.servers

OPS = ["write", "read", "read one", "lookup, all", "lookup, none"]
FIELDS = {"op", "chunks", "chunk_bytes", "gb_per_s", "ms", "rounds"}
SMALL = ("--chunk-bytes", "2MiB", "--chunks", "3", "--rounds", "2")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_redis.cli", "bench", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120"},
    )


def one_sentence(done: subprocess.CompletedProcess[str], status: int) -> str:
    assert (done.returncode, done.stdout) == (status, "")
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("lmcache-redis: ")
    return said


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, password="a-secret") as server:
        # What an agent may do, and no more: keys under its prefix.
        rights = ("~tenant:lmcr1:*", "+@all", "-@dangerous", "+info", "-flushall", "-flushdb")
        server.command("ACL", "SETUSER", "cache", "on", ">p@ss", *rights)
        yield server


def test_it_measures_an_own_server_and_leaves_it_as_it_was(server: RedisServer) -> None:
    server.command("SET", "of-the-user", "value")
    url = server.url.replace("redis://", "redis://cache:p%40ss@")
    done = run("--redis-url", url, "--key-prefix", "tenant:", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["server"] == server.url.removeprefix("redis://")
    rows = document["rows"]
    assert [row["op"] for row in rows] == OPS
    assert [row["chunks"] for row in rows] == [3, 3, 1, 3, 1000]
    for row in rows:
        assert set(row) == FIELDS
        assert (row["chunk_bytes"], row["rounds"]) == (2 << 20, 2)
        assert row["ms"] > 0
        assert (row["gb_per_s"] is None) == row["op"].startswith("lookup")
    assert server.command("KEYS", "*") == [b"of-the-user"]
    assert server.command("INFO", "stats")["expired_keys"] == 0, "removed, not left to expire"


def test_people_get_a_table(server: RedisServer) -> None:
    url = server.url.replace("redis://", "redis://:a-secret@")
    done = run("--redis-url", url, *SMALL)
    assert done.returncode == 0, done.stderr
    for word in (*OPS, "GB/s", "ms", "2MiB", "medians of 2 rounds"):
        assert word in done.stdout
    assert "a-secret" not in done.stdout


def test_a_server_that_is_full_is_named_and_left_empty(tmp_path: Path) -> None:
    with RedisServer(tmp_path, args=("--maxmemory", "20mb")) as server:
        words = ("--redis-url", server.url, "--chunk-bytes", "2MiB", "--chunks", "20")
        said = one_sentence(run(*words), 1)
        assert "Redis is at its memory limit and evicts nothing" in said
        assert server.command("DBSIZE") == 0
        server.config_set("maxmemory-policy", "allkeys-lru")
        said = one_sentence(run(*words), 1)
        assert "evicted: move fewer at a time" in said


def test_keys_of_a_run_that_is_killed_expire(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        words = ["--redis-url", server.url, "--chunk-bytes", "8MiB", "--rounds", "1000"]
        child = subprocess.Popen(
            [sys.executable, "-m", "lmcache_redis.cli", "bench", *words],
            stdout=subprocess.DEVNULL,
        )
        try:
            while not server.command("DBSIZE"):
                assert child.poll() is None
        finally:
            child.kill()
            child.wait()
        keyspace = server.command("INFO", "keyspace").get("db0", {"keys": 0, "expires": 0})
        assert keyspace["keys"] == keyspace["expires"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no server is named: give --redis-url or set LMCACHE_REDIS_URL"),
        (["--redis-url", "http://cache"], "the Redis URL must begin with redis://"),
        (["--chunk-bytes", "5000"], "--chunk-bytes is 5000: choose a multiple of 4KiB"),
        (["--chunk-bytes", "lots"], "'lots' is not a size"),
        (["--chunk-bytes", "1TiB"], "--chunks need over a quarter of this machine's memory"),
        (["--get-connections", "0"], "--get-connections is 0: set it to between 1 and 64"),
    ],
)
def test_a_wrong_setting_is_one_sentence(words: list[str], says: str) -> None:
    given = words if "--redis-url" in words or not words else ["--redis-url", "unix:///no", *words]
    assert says in one_sentence(run(*given), 2)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    said = one_sentence(run("--redis-url", f"redis://127.0.0.1:{free_port()}"), 1)
    assert "refuses connections" in said


def test_the_help_teaches() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("--redis-url", "--chunk-bytes", "--json", "medians", "removed", "Examples"):
        assert word in done.stdout


def test_sealed_values_are_measured_alike(server: RedisServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("11" * 32)
    keys.chmod(0o600)
    url = server.url.replace("redis://", "redis://:a-secret@")
    words = ("--redis-url", url, "--seal-key-file", str(keys))
    done = run(*words, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert [row["op"] for row in json.loads(done.stdout)["rows"]] == OPS
    assert "sealed with the key" not in done.stdout
