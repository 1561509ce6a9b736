# SPDX-License-Identifier: Apache-2.0
"""`lmcache-redis gateway` as a real process on the real tiers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.compat.gateway.wire import KEY, Client
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


def test_a_wrong_setting_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_redis.cli", "gateway", "--redis-url", "http://x"],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lmcache-redis: ")


def test_chunks_outlive_the_process_in_redis_and_are_sealed(tmp_path: Path) -> None:
    seal_keys = tmp_path / "keys"
    seal_keys.write_text("11" * 32)
    seal_keys.chmod(0o600)
    payload = b"of a prompt." * 30_000
    keys = [KEY, "m@1@0@-abc@half@7@who%me", "m@2@1@abc@half"]
    with RedisServer(tmp_path) as redis:
        words = ("--redis-url", redis.url, "--memory-bytes", "0")
        sealed = (*words, "--seal-key-file", str(seal_keys))
        with gateway(*sealed) as process, Client(process.port) as client:
            for key in keys:
                client.put(key, key.encode() + payload)
            assert client.exists(keys[-1])
            assert process.end()[0] == 0
        with redis.client() as direct:
            values = [direct.get(key) for key in direct.scan_iter()]
        assert values
        assert not any(b"of a prompt" in value for value in values)
        with gateway(*words) as process, Client(process.port) as client:
            assert client.get(KEY) is None
        with gateway(*sealed) as process, Client(process.port) as client:
            assert client.list() == set(keys)
            for key in keys:
                assert client.get(key) == key.encode() + payload
