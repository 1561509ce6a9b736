# SPDX-License-Identifier: Apache-2.0
"""`top` as a user runs it: a real agent, and a real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmcache_redis.cli.shown import change_document, console, frame, status_tables
from lmcache_redis.cli.status import rows
from lmcache_redis.tier_kinds import KINDS
from tests.cli.test_admin import COMMAND, TIMEOUT_S, environment, run
from tests.cli.test_size import LLAMA, write
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer

MODEL = "meta-llama/Llama-3.3-70B-Instruct-of-a-long-name"

LABELS = (
    *("hit rate", "saved   ", "bytes   ", "pool    ", "queues  ", "Redis   ", "loads   "),
    *("engines ", "canaries"),
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    directory = tmp_path_factory.mktemp("top")
    with (
        RedisServer(directory) as server,
        AgentServer(
            directory / "agent",
            server.unix_url,
            disk_path=directory / "disk",
            disk_size=64 << 20,
            compress="off",
        ) as agent,  # fmt: skip
    ):
        yield agent


@pytest.fixture(scope="module")
def report(agent: AgentServer) -> dict[str, Any]:
    """The status of an agent that has stored 4 chunks, and found 4 of 8."""
    with Engine(agent.endpoint, model_name=MODEL) as engine:
        hashes = block_hashes("prompt", 16)
        engine.store("s", hashes, range(16))
        assert engine.lookup("found", hashes) == 256
        assert engine.lookup("absent", block_hashes("another", 16)) == 0
        agent.wait_idle()
        return agent.status()


def text(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(frame(before, now))
    shown = console.export_text()
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    for label in LABELS:
        assert re.search(rf"^{label}  ", shown, re.M), label
    return shown


@pytest.mark.servers
def test_totals_and_rates(report: dict[str, Any]) -> None:
    whole = text(None, report)
    assert "since the agent's start" in whole
    assert "; up for " in whole
    assert "hit rate  50 %: host 50 %, disk 0 %, " in whole
    assert "saved     nothing yet" in whole
    assert re.search(r"meta-llama/Llama-\S+… +50 % +2 ", whole)
    assert re.search(r"absent +4 ", whole)
    assert "workers ready: 1 of 1; requests: 2; 2 lookups" in whole
    later = deepcopy(report)
    later["uptime_s"] += 2.0
    later["counters"]["retrieved_bytes"] += 250_000_000
    later["counters"]["drop_queue_full"] += 10
    later["models"][MODEL]["retrieved_bytes"] += 250_000_000
    change = text(report, later)
    assert "in the last 2.0 s" in change
    assert "hit rate  -: " in change
    assert "125 MB/s to engines" in change
    assert re.search(r"absent 0.0/s +4 +queue_full 5.0/s +10", change)
    later |= {"tokens_saved": 12_288, "prefill_s_saved": 3.456}
    assert "saved     12,288 tokens not computed, 3.46 s of prefill" in text(None, later)
    later["prefill_s_saved"] = None
    assert "12,288 tokens not computed, seconds unknown" in text(None, later)
    assert change_document(report, later)["counters"] == {
        "retrieved_bytes": 250_000_000, "drop_queue_full": 10,
    }  # fmt: skip
    # Counters of another process begin again.
    later["pid"] += 1
    assert "since the agent's start" in text(report, later)
    assert "none yet" in text(None, later | {"models": {}})


@pytest.mark.servers
def test_what_packing_saves_is_in_a_line_that_is_there(report: dict[str, Any]) -> None:
    plain = text(None, report)
    assert "% saved" not in plain
    assert "packed" not in [label for label, _, _ in rows(report)]
    later = deepcopy(report)
    later["uptime_s"] += 2.0
    later["counters"]["plain_bytes"] += 4 * 10**9
    later["counters"]["stored_bytes"] += 3 * 10**9
    shown = text(report, later)
    assert " 1,500 MB/s to redis (25 % saved)" in shown
    assert len(shown.splitlines()) == len(plain.splitlines())
    ((said, is_bad),) = [(said, bad) for label, said, bad in rows(later) if label == "packed"]
    assert re.fullmatch(r"saved 25 % of Redis: 2.8 GiB stored of 3.7 GiB", said)
    assert not is_bad
    for earlier in (deepcopy(report), later):  # the agent does not say
        del earlier["counters"]["plain_bytes"]
        assert "packed" not in [label for label, _, _ in rows(earlier)]
        assert "% saved" not in text(None, earlier)


@pytest.mark.servers
def test_trouble_is_shown_and_much_fits(report: dict[str, Any]) -> None:
    report = deepcopy(report)
    report["tiers"]["redis"] |= {"up": False, "reason": "Connection refused, " * 9}
    report["counters"] |= dict.fromkeys(report["counters"], 10**12)
    use = report["models"][MODEL]
    report["models"] = {f"{MODEL} {n}": use | {"lookup_tokens": n} for n in range(20)}
    report["canaries"] = {"every": 1000, "distrusted": [{}, {}]}
    report["tokens_saved"] = report["tokens_saved_untimed"] = 10**12
    report["prefill_s_saved"] = None
    shown = text(None, report)
    assert "DOWN: Connection refused" in shown
    report["tiers"]["redis"]["where"] = "cache:6379"
    fails = {"text": "CROSSSLOT, " * 9, "count": 2, "seconds_ago": 1.0}
    report["tiers"]["redis"] |= {"up": True, "last_error": fails}
    assert "up, and FAILS: CROSSSLOT" in text(None, report)
    assert "OTHER KV was cached than is computed: 2 layouts are not loaded" in shown
    assert shown.count("meta-llama") == 3


@pytest.mark.servers
def test_brackets_in_names_are_shown(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report = deepcopy(report)
    report["engines"][0]["model"] = "/models/[old]/[/v1]"
    for table in status_tables(report):
        console().print(table)
    assert "/models/[old]/[/v1] " in capsys.readouterr().out
    report["models"] = {"[old]/[/v1]": report["models"][MODEL]}
    report["tiers"]["redis"]["reason"] = "[/v1]"
    console().print(frame(None, report))
    assert "[old]/[/v1] " in capsys.readouterr().out


@pytest.mark.servers
def test_without_a_terminal_frames_follow_each_other(agent: AgentServer) -> None:
    words = [*COMMAND, "top", "--interval-s", "0.1", "--endpoint", agent.endpoint]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        seen = ""
        while seen.count("in the last 0.") < 3:
            seen += process.stdout.readline()
        assert "\x1b" not in seen
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ""
        assert process.wait(TIMEOUT_S) in (0, 1)


@pytest.mark.servers
def test_each_line_of_json_is_what_changed(agent: AgentServer) -> None:
    words = ["top", "--json", "--interval-s", "0.1", "--endpoint", agent.endpoint]
    (line,) = run(*words, "--once").stdout.splitlines()
    found = json.loads(line)
    assert found["pid"] == agent.pid
    assert 0.1 <= found["seconds"] < 60
    assert found["hit_rate"] == dict.fromkeys(kind.name for kind in KINDS)
    assert (found["redis_up"], found["tokens_saved"], found["counters"]) == (True, 0, {})


class Terminal:
    """A command in a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._settings = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True,
            env=environment(**{"COLUMNS": "80", "TERM": "xterm", **variables}),
            start_new_session=True,
        )  # fmt: skip

    @classmethod
    def top(cls, agent: AgentServer, **variables: str) -> Terminal:
        return cls("top", "--interval-s", "0.1", "--endpoint", agent.endpoint, **variables)

    def all_lines(self) -> list[str]:
        """What the command prints until it ends, without colours."""
        seen, ended = b"", False
        while not ended:
            ended = self.process.poll() is not None
            while select.select([self._ours], [], [], 0.05)[0]:
                seen += os.read(self._ours, 1 << 16)
        assert "Traceback" not in self.process.communicate(timeout=TIMEOUT_S)[1]
        os.close(self._ours)
        os.close(self._theirs)
        assert self.process.returncode in (0, 1)  # 1: what doctor has found
        return re.sub(r"\x1b\[[0-9;]*m", "", seen.decode()).splitlines()

    def wait_for(self, what: str) -> None:
        """Waits until the text comes, from now on."""
        deadline_s, seen = time.monotonic() + TIMEOUT_S, ""
        while what not in seen:
            assert time.monotonic() < deadline_s, seen
            if select.select([self._ours], [], [], 1.0)[0]:
                seen += os.read(self._ours, 1 << 16).decode(errors="replace")
        self.seen = seen

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def end(self) -> tuple[int, str]:
        """The exit status and stderr; the terminal is as it was."""
        self.wait_for("\x1b[?1049l")
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        assert termios.tcgetattr(self._theirs) == self._settings
        os.close(self._ours)
        os.close(self._theirs)
        return self.process.returncode, said


@pytest.mark.servers
@pytest.mark.parametrize("key", [b"q", b"\x04"])
def test_a_key_ends_it(agent: AgentServer, key: bytes) -> None:
    terminal = Terminal.top(agent)
    terminal.wait_for("in the last 0.")
    terminal.press(b"x")
    terminal.wait_for("in the last 0.")
    terminal.press(key)
    assert terminal.end() == (0, "")


@pytest.mark.servers
def test_an_agent_that_restarts_is_found_again(tmp_path: Path) -> None:
    with AgentServer(tmp_path / "agent", "redis://127.0.0.1:1") as agent:
        terminal = Terminal.top(agent)
        terminal.wait_for("in the last 0.")
        agent.kill()
        terminal.wait_for("no agent answers at")
        agent.start()
        terminal.wait_for("since the agent's start")
        terminal.wait_for("in the last 0.")
        terminal.press(b"q")
        assert terminal.end() == (0, "")


@pytest.mark.servers
def test_status_fits_a_terminal_of_80_columns(agent: AgentServer, report: dict[str, Any]) -> None:
    lines = Terminal("status", "--endpoint", agent.endpoint).all_lines()
    assert len(lines) <= 13
    assert max(len(line.rstrip()) for line in lines) <= 80
    labels = {line[:10].strip() for line in lines} - {""}
    assert labels == {
        *("agent", "hit rate", "saved", "pool", "disk", "Redis", "engines", "misses"),
        "stored",
    }
    everything = Terminal("status", "--all", "--endpoint", agent.endpoint).all_lines()
    assert max(len(line.rstrip()) for line in everything) <= 80
    assert any("saved_prefill" in line or "stored_chunks" in line for line in everything)


@pytest.mark.servers
def test_what_is_wrong_is_said(report: dict[str, Any]) -> None:
    assert "wrong" not in {label for label, _, _ in rows(report)}
    report = deepcopy(report)
    report["tiers"]["redis"] |= {"up": False, "reason": "Connection refused"}
    report["tiers"]["disk"] |= {"up": False, "reason": "no space"}
    report["queues"]["removals"] = 2
    report["pool"]["lock_failure"] = "RLIMIT_MEMLOCK"
    report["engines"][0]["ready"] = False
    bad = {text for _, text, is_bad in rows(report) if is_bad}
    assert f"DOWN: Connection refused ({report['redis']['server']})" in bad
    assert {
        f"DOWN: no space ({report['disk']['directory']})",
        "2 wrong chunks could not be removed yet",
    } < bad
    assert "not all of the host pool is locked for GPUs: RLIMIT_MEMLOCK" in bad
    said = {label: text for label, text, _ in rows(report) if label}
    assert said["engines"].startswith("0 of 1 workers ready: others wait for their scheduler")
    fails = {"text": "CROSSSLOT", "count": 2, "seconds_ago": 1.0}
    report["tiers"]["redis"] |= {"up": True, "last_error": fails}
    (said_bad,) = (text for label, text, is_bad in rows(report) if is_bad and label == "Redis")
    assert said_bad.startswith("up, and FAILS: CROSSSLOT (2 times, last 1 s ago); ")
    report["engines"] = []
    assert ("engines", "none is connected", False) in [*rows(report)]


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.servers
def test_no_traceback_where_output_is_ascii(
    agent: AgentServer, report: dict[str, Any], tmp_path: Path
) -> None:
    at = ("--endpoint", agent.endpoint)
    for words in (
        ("size", write(tmp_path / "model", LLAMA)),
        ("plan", "--example", str(tmp_path / "r\u00e9cit"), "--example-requests", "20"),
        ("status", "--all", *at),
        ("why", "--list", *at),
        ("doctor", "--no-bandwidth", *at),
        ("top", "--once", "--interval-s", "0.1", *at),
    ):
        lines = Terminal(*words, **ASCII).all_lines()
        assert lines
        assert "".join(lines).isascii()
    assert any(re.match(r"pool      [#.]{24} ", line) for line in lines)
    assert any("meta-llama/Llama" in line and "~ " in line for line in lines)
    terminal = Terminal.top(agent, PYTHONIOENCODING="ascii")
    terminal.wait_for("in the last 0.")
    terminal.press(b"q")
    assert terminal.end() == (0, "")
