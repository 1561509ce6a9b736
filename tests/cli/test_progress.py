# SPDX-License-Identifier: Apache-2.0
"""How far long work has come."""

from __future__ import annotations

import pytest

from lmcache_redis.admin.inspect import summarise
from lmcache_redis.admin.server import open_server
from lmcache_redis.cli.admin import shown_progress
from lmcache_redis.resp import RedisOptions
from tests.admin.cache import Cached
from tests.servers import RedisServer


def test_a_line_each_few_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    shown_progress(line_s=0.0)("keys removed", 1_000, 20_000)
    shown_progress()("keys removed", 1_000, 20_000)  # not yet
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
