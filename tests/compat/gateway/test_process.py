# SPDX-License-Identifier: Apache-2.0
"""`lmcache-redis gateway` as a real process on the real tiers."""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.compat.gateway.wire import GET, KEY, Client, header
from tests.objects.redis_tiers import wait_until
from tests.scraping import get, head, port_in, samples_in, undocumented
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

TIMEOUT_S = 60.0


class Process:
    """A gateway that serves. `end` sends a signal and gives its status and all it said."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_redis.cli", "gateway", "--listen", "lm://127.0.0.1:0",
             "--buffer-bytes", "8MiB", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "150"},
        )  # fmt: skip
        self._said: list[str] = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            if found := re.search(r" serves lm://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
                return
        raise AssertionError("".join(self._said))

    @property
    def said(self) -> str:
        """All that it said until it served."""
        return "".join(self._said)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self._process.send_signal(number)
        assert self._process.stderr is not None
        rest = self._process.stderr.read()
        return self._process.wait(TIMEOUT_S), "".join([*self._said, rest])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


@contextmanager
def gateway(*words: str) -> Iterator[Process]:
    process = Process(*words)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(number: int) -> None:
    with gateway("--memory-bytes", "16MiB") as process:
        with Client(process.port) as client:
            client.put(KEY, b"x" * 300_000)
            assert client.get(KEY) == b"x" * 300_000
            assert client.list() == {KEY}
            status, said = process.end(number)
            assert client.ended()
        assert status == 0
        assert (
            "stopped: connections 1, requests_put 1, requests_get 1, requests_list 1, "
            "puts_stored 1, gets_hit 1, payload_bytes_in" in said
        )
        assert "Traceback" not in said


def test_a_scrape_says_what_was_served(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        words = ("--redis-url", redis.url, "--memory-bytes", "16MiB", "--metrics", "127.0.0.1:0")
        with gateway(*words) as process, Client(process.port) as client:
            client.put(KEY, b"x" * 300_000)
            assert client.get(KEY) == b"x" * 300_000
            assert client.get("m@2@1@abd@half") is None
            port = port_in(process.said)

            def found() -> dict[str, float]:
                samples = samples_in(get(port, "/metrics")[1])
                prefix = "lmcache_redis_"
                return {
                    " ".join([name.removeprefix(prefix), *labels]): value
                    for (name, labels), value in samples.items()
                    if name.startswith(prefix)
                }

            wait_until(lambda: found()["stored_chunks_total redis"] == 1)
            expected = {
                "gateway_requests_total put": 1,
                "gateway_requests_total get": 2,
                "gateway_gets_total hit": 1,
                "gateway_gets_total miss": 1,
                "gateway_payload_bytes_total in": 300_000,
                "gateway_payload_bytes_total out": 300_000,
                "gateway_open_connections": 1,
                "gateway_buffer_size_bytes": 8 << 20,
                "gateway_up": 1,
                "plain_bytes_total redis": 300_000,
            }
            assert {name: found()[name] for name in expected} == expected
            page = text_string_to_metric_families(get(port, "/metrics")[1])
            own = [metric for metric in page if metric.name.startswith("lmcache_redis_")]
            assert undocumented(own, "Of a gateway") == set()
            assert get(port, "/healthz") == (200, "ok\n")
            assert head(port, "/healthz") == (200, 3, b"")
            redis.kill()
            wait_until(lambda: found()["gateway_up"] == 0)
            status, said = process.end()
            assert (status, "Traceback" in said) == (0, False)


def test_chunks_outlive_the_process_in_redis_and_on_disk(tmp_path: Path) -> None:
    payload = os.urandom(1_000_000)
    redis_directory = tmp_path / "redis"
    redis_directory.mkdir()
    keys = [KEY, "m@1@0@-abc@half@7@who%me", "m@2@1@abc@half"]
    with RedisServer(redis_directory) as redis:
        ways = (
            ("--redis-url", redis.url, "--memory-bytes", "16MiB"),
            ("--disk-path", str(tmp_path / "disk"), "--disk-size", "64MiB", "--memory-bytes", "0"),
        )
        for words in ways:
            with gateway(*words) as process, Client(process.port) as client:
                for key in keys:
                    client.put(key, key.encode() + payload)
                assert client.exists(keys[-1])
                assert process.end()[0] == 0
            with gateway(*words) as process, Client(process.port) as client:
                assert client.list() == set(keys)
                for key in keys:
                    assert client.get(key) == key.encode() + payload
                assert client.get("m@2@1@abd@half") is None
                assert process.end()[0] == 0


def test_a_disk_that_hangs_holds_up_neither_others_nor_the_end(tmp_path: Path) -> None:
    """A file is a FIFO: to open it hangs until somebody writes, which nobody does."""
    redis_directory, disk = tmp_path / "redis", tmp_path / "disk"
    redis_directory.mkdir()
    with RedisServer(redis_directory) as redis:
        words = ("--redis-url", redis.url, "--disk-path", str(disk), "--memory-bytes", "0",
                 "--shutdown-deadline-s", "0.5")  # fmt: skip
        with gateway(*words) as process, Client(process.port) as client:
            client.put(KEY, b"x" * 300_000)
            wait_until(lambda: len([*disk.rglob("*.lmcr")]) == 1)
            (path,) = disk.rglob("*.lmcr")
            path.unlink()
            os.mkfifo(path)

            def hangs() -> bool:
                """Until Redis has the chunk, too, it is read from the memory that it waits in."""
                client.send(header(GET, KEY))
                if select.select([client.socket], [], [], 1.0)[0]:
                    assert client.receive(36 + 300_000).endswith(b"x")
                    return False
                return True

            wait_until(hangs, "a GET that opens the file")
            with Client(process.port) as other:
                numbers = itertools.count()

                def is_given_up() -> bool:
                    """A PUT does not go to disk, and can be had all the same."""
                    before = [*disk.rglob("*.lmcr")]
                    for _ in range(2):  # the second waits until the first is written
                        key = f"m@2@0@{next(numbers):04x}@half"
                        other.put(key, key.encode())
                    assert other.get(key) == key.encode()
                    return len([*disk.rglob("*.lmcr")]) == len(before)

                wait_until(is_given_up, "PUTs that go to Redis alone", 120.0)
                assert other.healthy()
            status, said = process.end()
        assert status == 0
        assert said.count("the disk tier is down") == 1
        assert "Traceback" not in said


@pytest.mark.parametrize(
    "words", [("--redis-url", "http://x"), ("--listen", "lm://0.0.0.0:0")], ids=["URL", "open"]
)
def test_a_wrong_setting_is_one_sentence(words: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_redis.cli", "gateway", *words],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lmcache-redis: ")


def test_chunks_are_sealed_in_redis(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("11" * 32)
    keys.chmod(0o600)
    payload = b"of a prompt." * 30_000
    with RedisServer(tmp_path) as redis:
        words = ("--redis-url", redis.url, "--memory-bytes", "0")
        sealed = (*words, "--seal-key-file", str(keys))
        with gateway(*sealed) as process, Client(process.port) as client:
            client.put(KEY, payload)
            assert client.exists(KEY)
            with redis.client() as direct:
                wait_until(direct.dbsize)
        with redis.client() as direct:
            values = [direct.get(key) for key in direct.scan_iter()]
        assert values
        assert not any(b"of a prompt" in value for value in values)
        with gateway(*words) as process, Client(process.port) as client:
            assert client.get(KEY) is None
        with gateway(*sealed) as process, Client(process.port) as client:
            assert client.get(KEY) == payload
