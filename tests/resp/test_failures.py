# SPDX-License-Identifier: Apache-2.0
"""A server that is up and of no use: what its operations fail with is said, until they work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from lmcache_redis import KVStore
from lmcache_redis.errors import ConfigError, RedisReplyError, RedisTimeout, RedisUnavailable
from lmcache_redis.resp.failures import Failures
from lmcache_redis.resp.net.advice import BY_CODE, OTHER, REASONS, advice_on, reason_of
from lmcache_redis.resp.net.wire import ErrorReply, error_of
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.tiers import CallOutcome, Operation, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Chunk,
    check_stores,
    chunk_key,
    exists,
    read,
    running,
    scan,
    wait_until,
    write,
)
from tests.resp.trickling import Answer, LyingServer
from tests.servers import RedisServer

NO_BACKEND = b"-upstream failure\r\n"
STRIPE_BYTES = 2 << 20


# ------------------------------------------------------------------ the record


def test_each_kind_has_its_last_error_until_one_works() -> None:
    failures = Failures("here")
    assert failures.errors == ()
    for _ in range(3):
        failures.failed(Operation.ASK, error_of(ErrorReply("CROSSSLOT", "CROSSSLOT keys")))
    failures.failed(Operation.STORE, RedisTimeout("slow"))
    failures.worked(Operation.LOAD)
    assert [(e.operation, e.count, e.is_silence) for e in failures.errors] == [
        (Operation.STORE, 1, True),
        (Operation.ASK, 3, False),
    ]
    failures.worked(Operation.STORE)
    (error,) = failures.errors
    assert "write redis+cluster://" in error.text
    failures.worked(Operation.ASK)
    assert failures.errors == ()


def test_the_end_of_an_outage_says_nothing_of_what_was_refused() -> None:
    failures = Failures("here")
    failures.failed(Operation.PROBE, ConfigError("a file"))
    failures.failed(Operation.LOAD, RedisUnavailable("lost"))
    failures.failed(Operation.ASK, error_of(ErrorReply("NOPERM", "NOPERM no")))
    failures.outage_is_over()
    assert [error.operation for error in failures.errors] == [Operation.ASK]


def test_what_was_never_tried_in_time_is_an_error() -> None:
    failures = Failures("here:6379")
    failures.late(Operation.LOAD)
    failures.late(Operation.LOAD)
    (error,) = failures.errors
    assert (error.count, error.is_silence) == (1, True)
    assert error.text.startswith("Redis at here:6379 did not answer in time")


# ------------------------------------------------------------------ the advice


def test_every_code_says_what_to_change_or_says_so_itself() -> None:
    assert {code for code, advice in BY_CODE.items() if not advice.change} == {"ERR", "NOPERM"}
    assert set(REASONS) == {*BY_CODE, OTHER}
    assert [reason_of(code) for code in ("OOM", "", "MADEUP")] == ["OOM", OTHER, OTHER]
    assert error_of(ErrorReply("MADEUP", "MADEUP x")).refusal == OTHER


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("User ann has no permissions to run the 'get' command", "ACL SETUSER ann +get"),
        ("this user has no permissions to run the 'exists' command", "ACL SETUSER USER +exists"),
        ("No permissions to access a key", "~PREFIXlmcr2:*"),
        ("not today", "`lmcache-redis doctor` tries each"),
    ],
)
def test_a_missing_right_is_named(text: str, change: str) -> None:
    assert change in advice_on("NOPERM", f"NOPERM {text}").change


@pytest.mark.parametrize(
    "text", ["upstream failure", "no upstream host", "no healthy upstream", "ERR no backend"]
)
def test_a_proxy_without_backends_is_known(text: str) -> None:
    advice = advice_on("ERR" if text.startswith("ERR") else "", text)
    assert advice.kind is RedisReplyError
    assert "see its backends" in advice.change


# ------------------------------------------------------------- real servers


@pytest.mark.servers
def test_a_cluster_node_named_as_one_server(tmp_path: Path) -> None:
    """Stores succeed, lookups fail: what works does not hide what does not."""
    with RedisServer(tmp_path, args=("--cluster-enabled", "yes")) as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
        with running(server.url) as plane:
            chunks = [Chunk(number, 64, 64, seed=number) for number in range(8)]
            keys = [chunk.key for chunk in chunks]
            assert write(plane, *chunks) == [WriteOutcome.STORED] * 8
            assert plane.state.reason == ""
            for _ in range(3):
                assert scan(plane, keys).outcome is CallOutcome.UNAVAILABLE
                assert write(plane, chunks[0]) == [WriteOutcome.STORED]
            state = plane.state
            assert state.up
            assert "CROSSSLOT" in state.reason
            assert "write redis+cluster://" in state.reason
            assert [(e.operation, e.count) for e in state.errors] == [(Operation.ASK, 3)]
            assert plane.stats().refused["CROSSSLOT"] == 3
            assert sum(plane.stats().refused.values()) == 3
            assert exists(plane, keys[:1]).present == [True]
            assert plane.state.reason == ""


@pytest.mark.usefixtures("both_ways")
def test_replies_that_are_cut_by_a_limit(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that is lost in the middle of a reply has a line, an error and a reason."""
    chunk = Chunk(1, 2 * STRIPE_BYTES, STRIPE_BYTES, seed=1)
    with running(server.url) as plane, server.client() as client:
        check_stores(plane, chunk)
        client.config_set("client-output-buffer-limit", "normal 1mb 0 0")
        for _ in range(3):
            assert read(plane, Chunk(1, 2 * STRIPE_BYTES, STRIPE_BYTES)) == [
                ReadOutcome.UNAVAILABLE
            ]
            assert "client-output-buffer-limit" in plane.state.reason
            assert scan(plane, [chunk.key]) == (CallOutcome.DONE, 1)
        assert plane.state.up
        (error,) = plane.state.errors
        assert (error.operation, error.is_silence) == (Operation.LOAD, False)
        assert error.count >= 3
        assert plane.stats().errors >= 3
        lines = [r for r in caplog.records if "client-output-buffer-limit" in r.getMessage()]
        assert 1 <= len(lines) <= 2, "once a minute, for each cause that the kernel names"
        client.config_set("client-output-buffer-limit", "normal 0 0 0")
        assert read(plane, Chunk(1, 2 * STRIPE_BYTES, STRIPE_BYTES)) == [ReadOutcome.LOADED]
        assert plane.state.reason == ""


def test_clients_that_are_evicted(server: RedisServer) -> None:
    chunk = Chunk(1, 4 * STRIPE_BYTES, STRIPE_BYTES, seed=1)
    with running(server.url) as plane:
        try:
            server.config_set("maxmemory-clients", "1mb")
        except redis.ResponseError:
            pytest.skip("this server evicts no clients")
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert plane.state.up
        assert "maxmemory-clients" in plane.state.reason
        assert {error.operation for error in plane.state.errors} == {Operation.STORE}
        server.config_set("maxmemory-clients", "0")
        check_stores(plane, chunk)
        assert plane.state.reason == ""


def test_a_question_about_each_key_is_moved() -> None:
    """An answer to it, that they are not there, is no sign that it works."""

    def answer(words: list[bytes]) -> Answer:
        return b"-MOVED 7 127.0.0.1:1\r\n" if words[0] == b"EXISTS" else None

    with LyingServer(answer) as node, running(node.url) as plane:
        assert exists(plane, [chunk_key(1), chunk_key(2)]).outcome is CallOutcome.UNAVAILABLE
        assert plane.state.up
        assert "write redis+cluster://" in plane.state.reason
        assert plane.stats().refused["MOVED"] == 2


@pytest.mark.parametrize(
    ("command", "operation"), [("get", Operation.LOAD), ("exists", Operation.ASK)]
)
def test_a_right_that_is_missing(server: RedisServer, command: str, operation: Operation) -> None:
    chunk = Chunk(1, 64, 64, seed=1)
    with running(server.url) as plane, server.client() as client:
        check_stores(plane, chunk)
        client.execute_command("ACL", "SETUSER", "default", f"-{command}")

        def use() -> tuple[Any, ...]:
            return exists(plane, [chunk.key]).outcome, *read(plane, Chunk(1, 64, 64))

        asked = CallOutcome.UNAVAILABLE if command == "exists" else CallOutcome.DONE
        loaded = ReadOutcome.UNAVAILABLE if command == "get" else ReadOutcome.LOADED
        assert use() == (asked, loaded)
        assert f"+{command}" in plane.state.reason
        assert [error.operation for error in plane.state.errors] == [operation]
        assert plane.stats().refused["NOPERM"] == 1
        client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        assert use() == (CallOutcome.DONE, ReadOutcome.LOADED)
        assert plane.state.reason == ""


# ------------------------------------------------------------ proxies, played


def behind_ping(reply: bytes) -> Callable[[list[bytes]], Answer]:
    """What a proxy says whose backends are dead; if empty, nothing at all."""
    return lambda words: None if words[0] in (b"PING", b"CLIENT") else reply


def test_a_proxy_without_backends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    replies: list[bytes] = [NO_BACKEND]

    def answer(words: list[bytes]) -> Answer:
        return behind_ping(replies[0])(words) if replies else None

    with LyingServer(answer) as proxy, running(proxy.url) as plane:
        for _ in range(2):
            assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.UNAVAILABLE
        assert read(plane, Chunk(1, 64, 64)) == [ReadOutcome.UNAVAILABLE]
        assert write(plane, Chunk(1, 64, 64)) == [WriteOutcome.REJECTED]
        state = plane.state
        assert state.up
        assert "upstream failure" in state.reason
        assert "see its backends" in state.reason
        assert {(e.operation, e.count) for e in state.errors} == {
            (Operation.ASK, 2),
            (Operation.LOAD, 1),
            (Operation.STORE, 1),
        }
        assert plane.stats().refused[OTHER] == 4
        assert caplog.text.count("upstream failure") == 1
        replies.clear()
        assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.DONE
        assert "upstream failure" in plane.state.reason, "of the last load and the last store"


def test_a_proxy_that_is_silent_behind_ping() -> None:
    with (
        LyingServer(behind_ping(b"")) as proxy,
        running(proxy.url, op_timeout_s=0.2, heartbeat_s=60.0) as plane,
    ):
        assert scan(plane, [chunk_key(1)]).outcome is CallOutcome.TIMED_OUT
        assert read(plane, Chunk(1, 64, 64)) == [ReadOutcome.TIMED_OUT]
        wait_until(lambda: plane.state.up)
        assert "did not answer in time" in plane.state.reason
        assert all(error.is_silence for error in plane.state.errors)
        assert {error.operation for error in plane.state.errors} >= {Operation.LOAD}


# -------------------------------------------------------------- the library


def test_why_down_is_empty_only_if_the_last_call_worked(server: RedisServer) -> None:
    options = RedisOptions(server.url, connect_timeout_s=5.0, op_timeout_s=5.0)
    with KVStore(options, "names") as store, server.client() as client:
        wait_until(lambda: store.why_down == "", "the server is up, and nothing was tried")
        assert store.put_bytes("a", b"1" * 100)
        for command, call in (
            ("get", lambda: store.get_bytes("a")),
            ("set", lambda: store.put_bytes("a", b"2")),
        ):
            client.execute_command("ACL", "SETUSER", "default", f"-{command}")
            assert not call()
            assert f"+{command}" in store.why_down
            assert f"+{command}" in repr(store)
            client.execute_command("ACL", "SETUSER", "default", f"+{command}")
            assert call()
            assert store.why_down == ""
        assert store.get_bytes("missing") is None
        assert store.why_down == ""
