# SPDX-License-Identifier: Apache-2.0
"""`why` as a user runs it, and its sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from lmcache_redis.agent.reports.explaining import Explanations
from lmcache_redis.cli.why import (
    REASONS,
    compare,
    comparison_lines,
    list_lines,
    request_lines,
    unknown,
)
from lmcache_redis.errors import ConfigError
from lmcache_redis.tier_kinds import HOST, KINDS
from lmcache_redis.tiers import TierCounters
from tests.agent.test_history import agent_at, read_all, registered
from tests.agent.test_history import layout as layout_of
from tests.cache.played import run_until
from tests.cli.test_admin import one_sentence, run
from tests.harness import Engine, StartedAgent, block_hashes
from tests.servers import RedisServer

NOW_S = 1_800_000_000.0
A, B = "aa" * 32, "bb" * 32


def request(lookup: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("loaded", "failed", "stored", "present", "dropped", "compared"), 0)
    return {
        "kept": 7,
        "since_s": NOW_S - 9000,
        "chunk_size_tokens": 256,
        "requests": [
            {
                "request_id": "cmpl-1",
                "engine_id": "engine",
                "began_s": NOW_S - 90,
                "lookups": 1,
                "lookup": lookup,
                "parts": counts | {"load_s": 0.25, "because": []} | parts,
            }
        ],
    }


def lookup(reason: str = "", **changes: Any) -> dict[str, Any]:
    miss = {"chunk": 4, "token": 1024, "reason": reason, "because": [], "hash": "00"}
    found = {
        "at_s": NOW_S,
        "took_s": 0.0123,
        "model": "org/model",
        "first_chunk": 0,
        "asked_chunks": 20,
        "chunk_tokens": 256,
        "found_chunks": 4,
        "hits": {"host": 1, "redis": 3},
        "compare_only": False,
        "layouts": [A],
        "first_miss": miss if reason else None,
        "bet": None,
    }
    miss.update({name: changes.pop(name) for name in [*changes] if name not in found})
    return found | changes


def lines(report: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in request_lines(report, NOW_S)]


def test_a_hit() -> None:
    found = lines(request(lookup(first_chunk=2), loaded=4, stored=2, present=1))
    assert found[0] == "request cmpl-1"
    assert found[1].startswith("engine engine, ")
    assert found[1].endswith(", 90 s ago")
    assert found[2:] == [
        f"model org/model, layout {A[:16]}",
        "asked 20 chunks of 256 tokens, behind 512 tokens that vLLM had itself",
        "hit 4 chunks: 1 from the host pool, 3 from Redis, known after 12.3 ms",
        "loaded 4 parts into vLLM's blocks in 250.0 ms",
        "stored 2 parts, 1 were in the host pool before",
    ]


def test_a_chunk_that_another_layout_has() -> None:
    miss = lookup("absent", now=[None], other_layouts=[B], redis_answered=True)
    found = lines(request(miss, failed=2, dropped=3, because=["the host pool was full"]))
    assert found[5:] == [
        "missed chunk 4, from token 1,024 on",
        "because absent: neither in the host pool nor in any tier",
        f"it is there under another layout: {B[:16]}, see",
        f"lmcache-redis why --layouts {A[:16]} {B[:16]}",
        "failed 2 parts were not loaded, and computed instead",
        "stored 0 parts, 3 were dropped",
        "the host pool was full",
    ]


@pytest.mark.parametrize(
    ("now", "answered", "expected"),
    [
        (["redis"], True, ["under its own layout it is there now: stored since"]),
        ([None], True, []),
        (["host", None], True, ["1 of its 2 parts are there now"]),
        (
            [None],
            False,
            ["Redis does not answer now, so other layouts were not looked for there"],
        ),
    ],
)
def test_where_a_missed_chunk_is_now(
    now: list[str | None], answered: bool, expected: list[str]
) -> None:
    layouts = [A, B][: len(now)]
    miss = lookup("absent", now=now, other_layouts=[], redis_answered=answered, layouts=layouts)
    assert lines(request(miss, loaded=4))[7:-2] == expected


def test_what_the_bet_said() -> None:
    bet = {"chunks": 20, "load_s": 2.5, "compute_s": 1.5, "chosen_s": 1.25}
    found = lines(request(lookup("slower", bet=bet)))
    assert found[7] == (
        "the bet to compute 20 chunks: 1.50 s; to load them: 2.50 s; what was chosen: 1.25 s"
    )
    found = lines(request(lookup(bet=bet | {"chosen_s": 2.5}), loaded=20))
    assert found[5] == "the bet to compute 20 chunks: 1.50 s; to load them: 2.50 s"
    found = lines(request(lookup("slower", bet=bet | {"load_s": None})))
    assert "to load them: not known yet" in found[7]
    found = lines(request(lookup("slower")))
    assert found[7] == "the bet given up after 12.3 ms: computing takes less than the wait"


def test_other_ends() -> None:
    asked = lines(request(None, stored=1))
    assert asked[2].startswith("asked nothing: a prompt below 256 tokens is never asked")
    assert lines(request(lookup()))[-2] == (
        "loaded nothing: vLLM has not asked for the chunks that were found"
    )
    canary = lines(request(lookup(compare_only=True), compared=4))
    assert "compared 4 parts of a canary, which loads nothing" in canary
    assert not any(line.startswith("loaded") for line in canary)
    again = request(lookup())
    again["requests"][0]["lookups"] = 3
    assert "asked 20 chunks of 256 tokens; asked 3 times, this is the last" in lines(again)


def test_every_reason_has_a_sentence() -> None:
    of_tiers = [TierCounters.of(kind) for kind in KINDS if kind is not HOST]
    counters = {counter for each in of_tiers for counter in each.misses.values()}
    counters |= {each.silent for each in of_tiers}
    counters |= {"miss_slower", "miss_pool_full", "miss_load", "miss_mapping"}
    others = {"in_part", "distrusted", "not_registered", "layouts_differ"}
    assert set(REASONS) == {each.removeprefix("miss_") for each in counters} | others


def test_a_list_has_one_line_a_request() -> None:
    report = request(lookup("absent"), failed=2)
    for since_s, other in ((7200.0, None), (500_000.0, lookup())):
        report["requests"] += request(other)["requests"]
        report["requests"][-1]["began_s"] = NOW_S - since_s
    found = [" ".join(line.split()) for line in list_lines(report, NOW_S)]
    assert found[0].startswith("7 requests since 20")
    assert found[1:] == [
        "90 s ago cmpl-1 4 of 20 chunks hit, absent, 2 parts failed to load",
        "2.0 h ago cmpl-1 never asked",
        "5.8 days ago cmpl-1 4 of 20 chunks hit",
    ]


def test_an_unknown_request() -> None:
    text = unknown(request(), "chat-9")
    assert text.startswith("no request whose id contains 'chat-9' is known: the agent has 7 since")
    assert "never asked for if it has fewer than 256 tokens beside those in" in text


def row(layout: str, pairs: dict[str, str] | None, **changes: Any) -> dict[str, Any]:
    where = {"engine_id": "e1", "worker_id": 0, "group": 0}
    return {"layout": layout, "model": "org/model", "kv_rank": 1, "pairs": pairs} | where | changes


def known(rows: list[dict[str, Any]], redis_listed: bool = True) -> dict[str, Any]:
    return {"layouts": rows, "redis_listed": redis_listed}


def test_pairs_that_differ() -> None:
    one = {"revision": "main", "dtype": "bfloat16", "rank": "0", "gone": "x"}
    two = {"revision": "", "dtype": "bfloat16", "rank": "0", "new": "y"}
    rows = [row(A, one), row(B, two, engine_id=None, model="org/other")]
    compared = compare(known(rows), "aaaa", "bb")
    assert compared["differing"] == {
        "model": ["org/model", "org/other"],
        "revision": ["main", ""],
        "gone": ["x", None],
        "new": [None, "y"],
    }
    assert [*comparison_lines(compared)] == [
        f"A  {A}",
        "   org/model, worker 0 of engine e1",
        f"B  {B}",
        "   org/other, known from Redis: no engine with it is registered with this agent",
        "they differ in 4:",
        "  model",
        "    A  org/model",
        "    B  org/other",
        "    to share: the same name on the hub, or directories that are called alike",
        "  revision: of the hub",
        "    A  main",
        "    B  (empty)",
        "    to share: the same --revision",
        "  gone",
        "    A  x",
        "    B  (has no such pair)",
        "  new",
        "    A  (has no such pair)",
        "    B  y",
    ]


def test_equal_layouts_and_lost_descriptions() -> None:
    rows = [row(A, {"rank": "0"}), row(A, {"rank": "0"}, model="other"), row(B, None)]
    assert [*comparison_lines(compare(known(rows), A, "aa"))][-2:] == [
        "they are one layout: engines that have it share, if they name the model alike",
        "models with it: org/model, other",
    ]
    lost = [*comparison_lines(compare(known(rows), "a", "b"))]
    assert lost[-2] == f"Redis has lost the description of {B[:16]}"


def test_a_layout_that_is_not_one() -> None:
    rows = [row(A, {}), row("ab" * 32, {})]
    with pytest.raises(ConfigError, match="several layouts begin with 'a'"):
        compare(known(rows), "aa", "a")
    with pytest.raises(ConfigError, match=f"begins with 'c', .* Known are: {A[:16]}, abab"):
        compare(known(rows), "aa", "c")
    with pytest.raises(ConfigError, match="Known are: none"):
        compare(known([]), "a", "b")
    with pytest.raises(ConfigError, match="Redis did not list its descriptions in time"):
        compare(known(rows, redis_listed=False), "aa", "c")


class Node(NamedTuple):
    redis: RedisServer
    agent: StartedAgent


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        StartedAgent(tmp_path_factory.mktemp("agent"), redis.unix_url) as agent,
    ):
        yield Node(redis, agent)


@pytest.mark.servers
def test_why_of_a_real_agent(node: Node) -> None:
    redis, agent = node

    def why(*words: str) -> Any:
        return run("why", *words, "--endpoint", agent.endpoint)

    assert one_sentence(why("--last"), 1).endswith("in vLLM's own prefix cache")
    assert "give one of REQUEST_ID, --last, --list and --layouts" in one_sentence(why(), 2)
    assert one_sentence(why("r", "--last"), 2).startswith("lmcache-redis: give one of")
    hashes = block_hashes("prompt", 8)
    with (
        Engine(agent.endpoint) as engine,
        Engine(agent.endpoint, identity={"revision": "two"}) as other,
    ):
        assert engine.lookup("cmpl-cold-0-ab12", hashes) == 0
        engine.store("cmpl-cold-0-ab12", hashes, range(8))
        assert engine.lookup("cmpl-warm-0-cd34", hashes) == 128
        assert other.lookup("cmpl-other-0-ef56", hashes) == 0
        agent.wait_idle()
        (ours,) = json.loads(why("cmpl-warm", "--json").stdout)["requests"]
        assert ours["lookup"]["hits"] == {"host": 2}
        (theirs,) = json.loads(why("--last", "--json").stdout)["requests"]
        assert theirs["request_id"] == "cmpl-other-0-ef56"
        text = why("other").stdout
        assert "because   absent" in text
        command = next(line for line in text.splitlines() if "--layouts" in line).split()
        assert command[:3] == ["lmcache-redis", "why", "--layouts"]
        assert run(*command[1:], "--endpoint", agent.endpoint).stdout.splitlines()[4:] == [
            "they differ in 1:",
            "  revision: of the hub",
            "    A  two",
            "    B  (has no such pair)",
            "    to share: the same --revision",
        ]
        newest = [line.split()[3] for line in why("--list").stdout.splitlines()[1:]]
        assert newest == ["cmpl-other-0-ef56", "cmpl-warm-0-cd34", "cmpl-cold-0-ab12"]
        assert len(why("cmpl", "--most", "2").stdout.splitlines()) == 3
        assert "no request whose id contains 'chat'" in one_sentence(why("chat"), 1)

        # An engine of another node, whose chunks and description are in Redis.
        elsewhere = layout_of(revision="three", rank="0")
        with agent_at(redis.unix_url) as there:
            Explanations(there).write([registered(there, elsewhere)])
            run_until(there.loop, lambda: read_all(there))
        wanted = elsewhere.fingerprint(64).hex()[:12]
        done = why("--layouts", ours["lookup"]["layouts"][0], wanted.upper(), "--json")
        compared = json.loads(done.stdout)
        assert compared["layouts"][1]["engine_id"] is None
        assert compared["differing"]["revision"] == [None, "three"]
        assert compared["differing"]["dtype"] == ["float32", "uint8"]
        assert compared["to_share"]["revision"] == "the same --revision"
    unknown_layout = why("--layouts", wanted, "0123")
    assert f"Known are: {wanted}" in one_sentence(unknown_layout, 2)
    # What could not be listed is not absent.
    redis.command("ACL", "SETUSER", "default", "-scan")
    assert "Redis did not list" in one_sentence(why("--layouts", wanted, "0123"), 2)
