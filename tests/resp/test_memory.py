# SPDX-License-Identifier: Apache-2.0
"""Connections and look-ups that fail are freed without the garbage collector."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp.finder import ServerFinder
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.options import RedisOptions, parse_deployment
from tests.cycles import left_by

TIMES = 300
NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("host", ["no-such-host.invalid:6379", NOBODY])
def test_connections(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def look_up(name: str, *more: Any, flags: int = 0, **named: Any) -> Any:
        if "invalid" in name and not flags:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return known(name, *more, flags=flags, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    connector = Connector(parse_deployment(RedisOptions(f"redis://{host}")).server, 5.0, 5.0)

    def connect(number: int) -> None:
        with contextlib.suppress(RedisError):
            connector.open("test")

    assert left_by(connect, TIMES, lambda: None) == []


@pytest.mark.parametrize("url", [f"redis+sentinel://{NOBODY}/main", f"redis+cluster://{NOBODY}"])
def test_look_ups_of_servers(url: str) -> None:
    finder = ServerFinder(parse_deployment(RedisOptions(url)), 5.0)

    def find(number: int) -> None:
        with contextlib.suppress(RedisError, ConfigError):
            finder.find()

    assert left_by(find, TIMES, lambda: None) == []
