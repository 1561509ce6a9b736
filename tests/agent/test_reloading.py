# SPDX-License-Identifier: Apache-2.0
"""Reloading: which settings a running agent takes from its file, and what it refuses."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.main import RELOADABLE, _reloaded
from lmcache_redis.config import AgentConfig
from tests.agent.starts import Starts
from tests.harness import AgentServer, block_hashes, wait_until
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 8)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "agent.conf"
    path.write_text("# as it was\nlog-level = info\n")
    return path


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer, settings: Path) -> Iterator[AgentServer]:
    url = redis_server.unix_url
    constants = {"lmcache_redis.agent.sessions.SESSION_TIMEOUT_S": 1.0}
    with AgentServer(tmp_path / "agent", url, constants, config=settings) as server:
        yield server


def reload(agent: AgentServer, settings: Path, text: str, says: str) -> str:
    """What the agent logs about it."""
    settings.write_text(text)
    before = len(agent.log)
    os.kill(agent.pid, signal.SIGHUP)
    wait_until(lambda: says in agent.log[before:], what=says)
    return agent.log[before:]


def test_limits_and_the_level_of_the_log_change(
    start: Starts, agent: AgentServer, settings: Path
) -> None:
    text = "log-level = debug\nwrite-queue-bytes = 0\nshutdown-deadline-s = 0.5\ndisk-size = 1GiB\n"
    log = reload(agent, settings, text, "reloaded --write-queue-bytes")  # the last line
    for line in (
        "reloaded --log-level: debug, was info",
        "reloaded --write-queue-bytes: 0, was half of the host pool",
        "INFO reloaded --shutdown-deadline-s: 0.5, was 5",
        "reloaded --disk-size: 1GiB, was 64GiB",
    ):
        assert line in log
    engine = start.engine(agent)
    engine.store("r1", HASHES, range(8))
    wait_until(lambda: agent.counter("drop_queue_full") == 2, what="a queue without room")
    assert engine.lookup("r2", HASHES) == 128
    wait_until(lambda: agent.counter("sessions_timed_out") == 1, what="a session's end")
    # Only a worker registers. What is refused is a line for debugging.
    engine.scheduler.link.submit(m.RegisterKVCache, groups=(), storages=()).wait(60)
    assert " DEBUG " in agent.log
    reload(
        agent, settings, "log-level = info\n", "--write-queue-bytes: half of the host pool, was 0"
    )
    engine.store("r3", block_hashes("another prompt", 8), range(8))
    wait_until(lambda: agent.counter("stored_chunks") == 2, what="a queue with room")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("shutdown-deadline-s = 5\nlog-level = loud\n", "choose one of debug, info, warning"),
        ("shutdown-deadline-s = 5\nno-such-thing = 1\n", "line 2 of .* no setting 'no-such-thing'"),
        ("shutdown-deadline-s = never\n", "line 1 of .*: 'never' is not a number"),
    ],
)
def test_what_is_wrong_changes_nothing(
    agent: AgentServer, settings: Path, text: str, reason: str
) -> None:
    import re

    log = reload(agent, settings, text, "not reloaded")
    assert re.search(f"ERROR not reloaded, every setting stays as it is: .*{reason}", log)
    # Nor was a part of it taken.
    log = reload(agent, settings, "log-level = info\n", "reloaded")
    assert "reloaded: no setting has changed" in log
    settings.unlink()
    before = len(agent.log)
    os.kill(agent.pid, signal.SIGHUP)
    wait_until(lambda: "cannot be read" in agent.log[before:], what="a refusal")
    assert agent.status()["pid"] == agent.pid


def test_another_file_is_read_without_a_signal(start: Starts, settings: Path) -> None:
    """As the kubelet replaces it: under the same name, at once."""
    soon = {"lmcache_redis.agent.main._LOOK_S": 0.2}
    agent = start.agent(constants=soon, config=settings)
    other = settings.with_name("other.conf")
    other.write_text("log-level = debug\n")
    other.replace(settings)
    wait_until(lambda: "reloaded --log-level: debug" in agent.log, what="the other file")
    assert agent.log.count("reloaded") == 1


def test_what_needs_a_start_is_said_and_options_have_precedence(
    agent: AgentServer, settings: Path
) -> None:
    """The test's agent has --pool-bytes as an option."""
    text = "redis-url = redis://:secret@elsewhere\npool-bytes = 1GiB\nop-timeout-s = 3\n"
    log = reload(agent, settings, text, "from the next start on")
    assert "changed, but only from the next start on: --op-timeout-s\n" in log
    assert "secret" not in agent.log


def test_without_a_file_a_hangup_ends_the_agent(start: Starts) -> None:
    agent = start.agent()
    os.kill(agent.pid, signal.SIGHUP)
    assert agent.process.wait(30) == -signal.SIGHUP


def test_what_is_reloaded_is_applied() -> None:
    """Not only logged: the queue's limit is told in bytes whatever its setting is."""
    applied = inspect.getsource(_reloaded)
    assert [n for n in RELOADABLE if f"running.{n.removesuffix('_bytes')}" not in applied] == []


def test_the_page_names_what_is_reloaded() -> None:
    assert set(RELOADABLE) <= set(AgentConfig.__dataclass_fields__)
    page = (ROOT / "docs" / "guides" / "node.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| reloaded |")]
    assert line.count("`") == 2 * len(RELOADABLE)
    for name in RELOADABLE:
        assert f"`{name.replace('_', '-')}`" in line
