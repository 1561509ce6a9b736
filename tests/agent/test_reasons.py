# SPDX-License-Identifier: Apache-2.0
"""A Redis that is up and of no use: every face of the agent says why, and stops when it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.agent.reports import words
from lmcache_redis.cli.status import rows
from lmcache_redis.cli.why import request_lines
from lmcache_redis.client.control import ControlClient
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.resp.trickling import Answer, LyingServer
from tests.scraping import get, port_in, samples_in
from tests.servers import RedisServer

pytestmark = pytest.mark.servers


class Place:
    """An agent and its engine. Each lookup is of another prompt, which was stored before."""

    def __init__(self, stack: ExitStack, directory: Path, url: str, **options: Any) -> None:
        options = {"metrics": "127.0.0.1:0"} | options
        self.agent = stack.enter_context(AgentServer(directory, url, **options))
        self.engine = stack.enter_context(Engine(self.agent.endpoint))
        self.port = port_in(self.agent.log)
        self._asked = 0

    def ask(self, hashes: list[bytes], **more: Any) -> int:
        self._asked += 1
        tokens = self.engine.lookup(f"ask {self._asked}", hashes, **more)
        self.engine.scheduler.end_session(f"ask {self._asked}")
        return tokens

    @property
    def redis(self) -> dict[str, Any]:
        return dict(self.agent.status()["redis"])

    def status_text(self) -> str:
        return "\n".join(f"{label} {text}" for label, text, _ in rows(self.agent.status()))

    def why(self) -> str:
        return "\n".join(request_lines(ControlClient(self.agent.endpoint, 10).why("", 1), 0.0))

    def said(self, what: str) -> None:
        """By every face, of the last lookup."""
        redis = self.redis
        assert redis["up"]
        assert what in redis["reason"]
        assert what in redis["last_error"]["text"]
        assert redis["last_error"]["count"] >= 1
        assert 0 <= redis["last_error"]["seconds_ago"] < 60
        assert what in words.failing(redis)
        assert "FAILS" in self.status_text()
        assert what in " ".join(self.status_text().split())
        assert what in self.why()
        page = get(self.port, "/")[1]
        assert "Redis is up, and fails" in page
        assert what in page

    def sample(self, name: str, *labels: str) -> float:
        return samples_in(get(self.port, "/metrics")[1])[f"lmcache_redis_{name}", labels]

    def silent_again(self) -> None:
        redis = self.redis
        assert (redis["up"], redis["reason"], redis["last_error"]) == (True, "", None)
        assert "FAILS" not in self.status_text()
        assert "Redis is up</span>" in get(self.port, "/")[1]


@contextmanager
def place(directory: Path, url: str, **options: Any) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, directory, url, **options)


_OF_REDIS = ("redis_error", "redis_silent")


def prompts(name: str, count: int = 6) -> list[list[bytes]]:
    """Of two chunks each."""
    return [block_hashes(f"{name} {number}", 8) for number in range(count)]


def test_a_cluster_node_named_as_one_server(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with RedisServer(tmp_path / "r", args=("--cluster-enabled", "yes")) as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
        with place(tmp_path / "a", server.url) as here:
            here.silent_again()
            for hashes in prompts("of a cluster"):
                assert here.ask(hashes) == 0
            here.said("CROSSSLOT")
            here.said("write redis+cluster://")
            assert here.redis["last_error"]["count"] == 6
            assert here.sample("redis_replies_refused_total", "CROSSSLOT") == 6
            assert here.sample("cut_lookups_total", "error") == 6
            assert here.sample("missed_chunks_total", "redis_error") == 12


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (
            ("CONFIG", "SET", "client-output-buffer-limit", "normal 20kb 0 0"),
            ("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0"),
            "client-output-buffer-limit",
        ),
        (("ACL", "SETUSER", "default", "-get"), ("ACL", "SETUSER", "default", "+get"), "+get"),
        (
            ("ACL", "SETUSER", "default", "-exists"),
            ("ACL", "SETUSER", "default", "+exists"),
            "+exists",
        ),
    ],
    ids=["replies are cut", "no GET", "no EXISTS"],
)
def test_what_is_stored_cannot_be_read(
    tmp_path: Path,
    redis_server: RedisServer,
    begin: tuple[str, ...],
    end: tuple[str, ...],
    said: str,
) -> None:
    """Whether the engine knows what computing takes or not: no miss is called slow or late."""
    url = redis_server.unix_url
    with place(tmp_path / "w", url) as writer, place(tmp_path / "r", url) as reader:
        stored = prompts("stored")
        for number, hashes in enumerate(stored):
            writer.engine.store(f"store {number}", hashes, range(8))
        writer.agent.wait_idle()
        redis_server.command(*begin)
        for number, hashes in enumerate(stored[1:]):
            assert reader.ask(hashes, token_s=number % 2) == 0
        reader.said(said)
        counters = reader.agent.counters()
        missed = {name: n for name, n in counters.items() if name.startswith("miss_") and n}
        assert set(missed) == {"miss_redis_error"}
        assert (counters["lookups_failed"], counters["lookups_cut"]) == (5, 0)
        if said.startswith("+"):
            wait_until(lambda: reader.sample("redis_replies_refused_total", "NOPERM") >= 5)
        assert counters["redis_errors"] >= 1
        assert reader.agent.log.count(said) <= 4, "once a minute, each sentence"
        redis_server.command(*end)
        assert reader.ask(stored[0]) == 128
        reader.silent_again()


def behind_ping(reply: bytes) -> Callable[[list[bytes]], Answer]:
    """What a proxy says whose backends are dead."""
    return lambda words: None if words[0] in (b"PING", b"CLIENT") else reply


@pytest.mark.parametrize(
    ("reply", "said", "reason", "token_s"),
    [
        (b"-upstream failure\r\n", "see its backends", "redis_error", 0.0),
        (b"-no healthy upstream\r\n", "see its backends", "redis_error", 0.0001),
        (b"", "did not answer in time", "redis_silent", 0.0),
        (b"", "did not answer in time", "redis_silent", 0.0001),
    ],
    ids=["failure", "no upstream", "silent", "silent, a fast engine"],
)
def test_a_proxy_whose_backends_are_dead(
    tmp_path: Path, reply: bytes, said: str, reason: str, token_s: float
) -> None:
    works = [False]

    def answer(words: list[bytes]) -> Answer:
        return None if works[0] else behind_ping(reply)(words)

    options = {"lookup_deadline_s": 0.3, "op_timeout_s": 0.2}
    with LyingServer(answer) as proxy, place(tmp_path / "a", proxy.url, **options) as here:
        for hashes in prompts("behind a proxy"):
            assert here.ask(hashes, token_s=token_s) == 0
        wait_until(lambda: here.redis["last_error"])
        assert here.ask(block_hashes("another", 8), token_s=token_s) == 0
        here.said(said)
        missed = {each: here.sample("missed_chunks_total", each) for each in _OF_REDIS}
        # An engine this fast may not have waited for an answer.
        assert sum(missed.values()) == 14
        assert missed[reason] == 14 or token_s
        assert here.sample("cut_lookups_total", "error") == 7
        assert here.sample("tier_slow", "redis") == 0
        if reply:
            assert here.sample("redis_replies_refused_total", "other") >= 6
        works[0] = True
        tries = iter(range(10_000))
        wait_until(
            lambda: here.ask(block_hashes(f"again {next(tries)}", 8)) or not here.redis["reason"]
        )
        here.silent_again()
