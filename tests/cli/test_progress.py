"""How far long work has come: for people on a terminal, and for logs."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import pytest

from lmcache_redis.admin.inspect import summarise
from lmcache_redis.admin.server import open_server
from lmcache_redis.cli.progress import shown_progress
from lmcache_redis.resp import RedisOptions
from tests.admin.cache import Cached
from tests.cli.test_admin import COMMAND, TIMEOUT_S, environment
from tests.servers import RedisServer


def test_a_line_each_few_seconds_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress(line_s=0.0) as show:
        show("keys removed", 1_000, 20_000)
    with shown_progress() as show:
        show("keys removed", 1_000, 20_000)  # not yet
    assert capfd.readouterr().err == "keys removed: 1,000 of 20,000\n"


@pytest.mark.servers
def test_what_verifies_and_scans_says_how_far(server: RedisServer) -> None:
    said: list[tuple[str, int, int]] = []
    with server.client() as client:
        for number in range(3):
            Cached(number).put(client)
    with open_server(RedisOptions(server.unix_url)) as servers:
        summarise(
            servers, b"", everything=True, verify=True, progress=lambda *step: said.append(step)
        )
    assert said[0][0] == "keys scanned"
    assert said[0][2] == 9
    assert [step for step in said if step[0] == "chunks verified"] == [
        ("chunks verified", number, 3) for number in (1, 2, 3)
    ]


@pytest.mark.servers
def test_a_bar_on_a_terminal(server: RedisServer) -> None:
    """It goes to standard error, and is gone at the end."""
    with server.client() as client:
        for number in range(30):
            Cached(number).put(client)
    ours, theirs = pty.openpty()
    words = ["purge", "--everything", "--yes", "--keys-per-second", "100"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--redis-url", server.unix_url],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(TERM="xterm"),
    )
    os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    said, _ = process.communicate(timeout=TIMEOUT_S)
    os.close(ours)
    assert b"removed 30 chunks (90 keys" in said
    assert b"\x1b" not in said
    assert re.search(rb"keys removed.*/90", shown), shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody has it open any more
        return b""
