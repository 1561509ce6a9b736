# SPDX-License-Identifier: Apache-2.0
"""`inspect`, `purge` and `doctor` as a user runs them: real processes, a real server."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.cli.admin import shown_progress
from lmcache_redis.seal import read_seal_keys
from tests import forks
from tests.admin.cache import Cached, age, everything
from tests.harness import wait_until
from tests.servers import RedisServer

TIMEOUT_S = 60.0
SECRET = "s3cr3t"
COMMAND = [sys.executable, "-m", "lmcache_redis.cli"]


def environment(**changed: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LMCACHE_REDIS_")}
    return {**kept, "COLUMNS": "150", **changed}


def run(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return forks.run(words, environment(**changed), TIMEOUT_S)


def one_sentence(done: subprocess.CompletedProcess[str], status: int) -> str:
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lmcache-redis: ")
    assert SECRET not in line
    return line


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), password=SECRET) as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis_server.client() as client:
        yield client


@pytest.fixture
def known(redis_server: RedisServer) -> dict[str, str]:
    """The environment that names the server and its password."""
    return {"LMCACHE_REDIS_URL": redis_server.url, "LMCACHE_REDIS_PASSWORD": SECRET}


@pytest.mark.servers
@pytest.mark.parametrize("words", [["inspect"], ["purge", "--everything", "--yes"], ["doctor"]])
def test_a_server_must_be_named(words: list[str]) -> None:
    assert "give --redis-url or set LMCACHE_REDIS_URL" in one_sentence(run(*words), 2)


def test_no_way_in_is_one_sentence(redis_server: RedisServer, tmp_path: Path) -> None:
    url = ("--redis-url", redis_server.url)
    assert "wants a password" in one_sentence(run("doctor", *url), 3)
    wrong = {"LMCACHE_REDIS_PASSWORD": "wrong"}
    assert "refuses the user or the password" in one_sentence(run("inspect", *url, **wrong), 1)
    nowhere = ("--redis-url", f"unix://{tmp_path}/none.sock")
    assert "start Redis, or correct the Redis URL" in one_sentence(run("inspect", *nowhere), 1)
    wrong = one_sentence(run("inspect", "--redis-url", "http://x"), 2)
    for scheme in ("redis", "rediss", "unix", "redis+sentinel", "rediss+cluster"):
        assert f" {scheme}://" in wrong


def test_inspect_for_people_and_programs(client: Any, known: dict[str, str]) -> None:
    Cached(1).put(client)
    Cached(2).put(client, 1, 2)
    done = run("inspect", **known)
    assert (done.returncode, done.stderr) == (0, "")
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:4] == ["model", "layout", "workers", "chunks"]
    assert row.split()[:4] == ["org/model", Cached().name.layout, "1", "2"]
    (group,) = json.loads(run("inspect", "--all", "--json", **known).stdout)["groups"]
    assert (group["chunks"], group["incomplete"], group["stripes"]) == (2, 1, 5)


def test_inspect_a_key(client: Any, known: dict[str, str]) -> None:
    chunk = Cached(1, prefix=b"ours:")
    chunk.put(client)
    done = run(
        "inspect", chunk.keys[2].hex(), "--verify", "--key-prefix", "ours:", "--json", **known
    )
    report = json.loads(done.stdout)
    assert report["verdict"] == "complete"
    assert (report["model"], report["rank"], report["world_size"]) == ("org/model", 0, 2)
    assert report["stripe_asked"] == 2
    assert [stripe["state"] for stripe in report["stripes"]] == ["whole"] * 3


def test_inspect_opens_what_is_sealed(client: Any, known: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("11" * 32)
    path.chmod(0o600)
    keys = read_seal_keys(str(path))
    assert keys is not None
    chunk = Cached(1, sealed_with=keys)
    chunk.put(client)
    words = ("inspect", chunk.keys[0].hex(), "--verify", "--json")
    report = json.loads(run(*words, "--seal-key-file", str(path), **known).stdout)
    assert (report["verdict"], report["opened"]) == ("complete", True)
    assert report["sealed_with"] == keys.ids[0].hex()
    by_environment = run(*words, **known, LMCACHE_REDIS_SEAL_KEY_FILE=str(path))
    assert json.loads(by_environment.stdout)["opened"]
    path.chmod(0o644)
    refused = run(*words[:-1], "--seal-key-file", str(path), **known)
    assert "open to others" in one_sentence(refused, 2)


def test_inspect_takes_what_redis_cli_prints(
    client: Any, known: dict[str, str], redis_server: RedisServer
) -> None:
    Cached(1).put(client, 0)
    said = subprocess.run(
        ["redis-cli", "--no-raw", "-s", redis_server.socket_path, "--no-auth-warning", "keys", "*"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(REDISCLI_AUTH=SECRET),
    )
    done = run("inspect", said.stdout.strip(), **known)
    assert "verdict    incomplete: stripes are missing" in done.stdout
    assert "1 of 3 present" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "select what to remove: give --model, --layout, --idle-longer-than"),
        (["--layout", "xyz", "--yes"], "--layout 'xyz' is not a layout"),
        (["--stored-longer-than", "ages"], "--stored-longer-than 'ages' is not a duration"),
        (["--everything", "--keys-per-second", "0.5"], "--keys-per-second is 0.5"),
        (["--everything"], "there is no terminal to ask on: give --yes"),
    ],
)
def test_purge_refuses_in_one_sentence(
    client: Any, known: dict[str, str], words: list[str], says: str
) -> None:
    Cached(1).put(client)
    assert says in one_sentence(run("purge", *words, **known), 2)
    assert client.dbsize() == 3


def test_purge(client: Any, known: dict[str, str], redis_server: RedisServer) -> None:
    Cached(1, model="other").put(client)
    client.set("lmcr2:somebody", "else")
    before = everything(redis_server)
    gone = Cached(1)
    gone.put(client)
    dry = run("purge", "--model", "org/model", "--dry-run", **known)
    assert (dry.returncode, dry.stderr) == (0, "")
    assert "1 chunk (3 keys, " in dry.stdout
    assert client.exists(*gone.keys) == 3
    done = run("purge", "--model", "org/model", "--yes", **known)
    assert (done.returncode, done.stderr) == (0, "")
    assert "removed 1 chunk (3 keys, 10.0 KiB) in " in done.stdout
    assert everything(redis_server) == before
    again = run("purge", "--model", "org/model", "--yes", **known)
    assert "nothing to remove" in again.stdout


def test_purge_by_age_and_for_programs(client: Any, known: dict[str, str]) -> None:
    old = Cached(1)
    old.put(client)
    Cached(2).put(client)
    age(client, old.keys[0], 8 * 86_400)
    words = ("purge", "--idle-longer-than", "7d", "--json")
    assert json.loads(run(*words, "--dry-run", **known).stdout)["chunks"] == 1
    removed = json.loads(run(*words, "--yes", **known).stdout)
    assert (removed["chunks"], removed["stripes"]) == (1, 3)
    assert (removed["left"], removed["left_examples"]) == ({}, [])
    assert set(client.keys("*")) == set(Cached(2).keys)


@pytest.mark.parametrize(("answer", "left"), [("n", 3), ("y", 0)])
def test_purge_asks_on_a_terminal(
    client: Any, known: dict[str, str], answer: str, left: int
) -> None:
    Cached(1).put(client)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "purge", "--everything"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**known),
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    said, errors = process.communicate(timeout=TIMEOUT_S)
    os.close(ours)
    assert errors == (b"nothing was removed\n" if left else b"")
    assert b"Remove them? [y/N]" in said
    assert process.returncode == (1 if left else 0)
    assert client.dbsize() == left


def test_an_interrupted_purge_says_what_it_did(client: Any, known: dict[str, str]) -> None:
    for number in range(20):
        Cached(number).put(client)
    process = subprocess.Popen(
        [*COMMAND, "purge", "--everything", "--yes", "--keys-per-second", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**known),
    )
    wait_until(lambda: client.dbsize() <= 57, "a first chunk removed", TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert "Traceback" not in errors
    said_keys = re.search(r"^removed \d+ chunks? \((\d+) keys?, ", said, flags=re.MULTILINE)
    assert said_keys is not None
    # What was sent in the moment of the signal may be carried out uncounted: one chunk at most.
    gone = 60 - client.dbsize()
    assert 3 <= gone < 60
    assert gone - 3 <= int(said_keys.group(1)) <= gone


def test_doctor(client: Any, known: dict[str, str], redis_server: RedisServer) -> None:
    client.set("key", "value")
    before = everything(redis_server)
    done = run("doctor", **known)
    assert (done.returncode, done.stderr) == (1, "")
    first = done.stdout.splitlines()[0]
    assert first == "CRITICAL  maxmemory: there is no memory limit"
    assert "change  CONFIG SET maxmemory " in done.stdout
    assert "128 KiB of KV a token x 8,000 tokens/s of prefill" in done.stdout
    assert everything(redis_server) == before
    report = json.loads(run("doctor", "--json", "--no-bandwidth", **known).stdout)
    assert report["exit_status"] == 1
    assert report["findings"][0]["severity"] == "critical"
    assert report["facts"][0]["read_bytes_per_s"] is None
    assert SECRET not in done.stdout + json.dumps(report)


@pytest.mark.servers
def test_doctor_is_content_with_a_good_server(tmp_path: Path) -> None:
    settings = ("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path, args=settings) as server:
        little = ("--kv-bytes-per-token", "1", "--prefill-tokens-per-s", "1")
        done = run("doctor", *little, "--redis-url", server.unix_url)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert " 0 critical, 0 warning, " in done.stdout


def test_long_work_says_how_far_it_has_come(capfd: pytest.CaptureFixture[str]) -> None:
    """A line each few seconds."""
    shown_progress(line_s=0.0)("keys removed", 1_000, 20_000)
    shown_progress()("keys removed", 1_000, 20_000)  # not yet
    assert capfd.readouterr().err == "keys removed: 1,000 of 20,000\n"
