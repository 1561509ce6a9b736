# SPDX-License-Identifier: Apache-2.0
"""The contract against every server here: Redis of the PATH, Redis 6.2, Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_redis.agent.embedded import OLDEST_VERSION
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp import test_connect, test_faults, test_survival
from tests.resp.helpers import (
    STEM,
    Chunk,
    check_moves,
    chunk_key,
    clear,
    exists,
    read,
    running,
    scan,
    write,
)
from tests.servers import RedisServer, server_binaries

pytestmark = pytest.mark.servers

SLOT = 30_000
SIZES = (1, SLOT, SLOT + 1, 100_000, 3 << 20)
BINARIES = server_binaries()


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> str:
    executable = BINARIES[request.param]
    if executable is None:
        pytest.skip(f"there is no {request.param} here")
    return executable


@pytest.fixture
def any_server(tmp_path: Path, binary: str) -> Iterator[RedisServer]:
    """A server of each kind, that the test may stop, kill and configure."""
    with RedisServer(tmp_path, executable=binary) as server:
        yield server


def test_store_load_scan_and_clear(any_server: RedisServer) -> None:
    info = any_server.command("INFO", "server")
    # Valkey says its own version beside that of the Redis it is compatible with.
    version = str(info.get("valkey_version", info["redis_version"])).split(".")
    assert tuple(map(int, version[:2])) >= OLDEST_VERSION
    for url in (any_server.url, any_server.unix_url):
        with running(url) as plane:
            chunks = [Chunk(n, size, SLOT, seed=n) for n, size in enumerate(SIZES)]
            keys = [chunk_key(n) for n in range(len(SIZES) + 1)]
            assert scan(plane, keys) == (CallOutcome.DONE, 0)
            check_moves(plane, *chunks)
            assert scan(plane, keys) == (CallOutcome.DONE, len(SIZES))
            any_server.command("UNLINK", chunks[1].stripe_keys()[0], chunks[3].stripe_keys()[2])
            assert list(exists(plane, keys).present) == [True, False, True, True, True, False]
            outcomes = read(plane, chunks[1].empty(), chunks[3].empty())
            assert outcomes == [ReadOutcome.MISSING, ReadOutcome.INCOMPLETE]
            any_server.command("SET", "a stranger", "x")
            assert clear(plane, STEM).outcome is CallOutcome.DONE
            assert any_server.command("KEYS", "*") == [b"a stranger"]


def test_wrong_password_then_right(tmp_path: Path, binary: str) -> None:
    with (
        RedisServer(tmp_path, password="right", executable=binary) as server,
        running(server.url, password="wr0ng") as plane,
    ):
        state = plane.state
        assert not state.up
        assert "password" in state.reason
        assert "wr0ng" not in state.reason
        assert write(plane, Chunk(1, SLOT, SLOT)) == [WriteOutcome.UNAVAILABLE]
        server.config_set("requirepass", "wr0ng")
        test_faults.check_works(plane)


@pytest.mark.parametrize("binary", [name for name in BINARIES if name != "redis"], indirect=True)
@pytest.mark.parametrize(
    "survives",
    [
        test_connect.test_a_user_with_few_rights_is_enough,
        test_faults.test_too_few_connections,
        test_faults.test_full_without_eviction,
        test_faults.test_full_while_replacing_delivers_no_mixture,
        test_faults.test_a_server_busy_with_a_script,
        test_faults.test_a_read_only_replica_rejects_writes,
        test_survival.test_a_server_that_loads_its_data,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_faults_of(any_server: RedisServer, survives: Callable[[RedisServer], None]) -> None:
    """The tests of faults that a server may answer in words of its own.

    Those named "redis" run in their own files.
    """
    survives(any_server)
