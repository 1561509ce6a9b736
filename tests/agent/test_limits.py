# SPDX-License-Identifier: Apache-2.0
"""How much of Redis a tenant may have written: two agents share its account, and time frees it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.agent import limits
from lmcache_redis.agent.limits import BUCKETS, DAY_S, TenantLimits
from lmcache_redis.agent.uses import Tenants
from lmcache_redis.cache.threads import OwnerLoop
from lmcache_redis.cli.why import request_lines
from lmcache_redis.client.control import ControlClient
from lmcache_redis.errors import ConfigError
from lmcache_redis.tenants import parse_limits
from lmcache_redis.tiers import CallOutcome, NumbersResult
from tests.acl import documented_url
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

MIB = 1 << 20


class PlayedPlane:
    """Answers when it is told to."""

    adds_up = False

    def __init__(self) -> None:
        self.options = type("Options", (), {"key_prefix": b"p:", "op_timeout_s": 1.0})
        self.asked: list[tuple[list[bytes], dict[bytes, int], int, Callable[[Any], None]]] = []
        self.numbers: dict[bytes, int] = {}

    def add_up(
        self, keys: list[bytes], amounts: dict[bytes, int], ttl_s: int, _: float, done: Any
    ) -> None:
        self.asked.append((keys, amounts, ttl_s, done))

    def answer(
        self, *, is_up: bool = True, lost: int | None = None, refused: int | None = None
    ) -> None:
        """lost: the place of a key whose server has not answered. refused: of one that refuses."""
        keys, amounts, _, done = self.asked.pop()
        if not is_up:
            done(NumbersResult(CallOutcome.UNAVAILABLE))
            return
        found: list[int | None] = []
        for place, key in enumerate(keys):
            if place not in (lost, refused):
                self.numbers[key] = self.numbers.get(key, 0) + amounts.get(key, 0)
            found.append(None if place in (lost, refused) else self.numbers[key])
        refusals = [place == refused for place in range(len(keys))]
        done(NumbersResult(CallOutcome.DONE, found, refusals))


class Played:
    def __init__(self, limits: str, ttl_s: int = 0, plane: PlayedPlane | None = None) -> None:
        self.plane = plane or PlayedPlane()
        self.loop = OwnerLoop(lambda: None)
        self.now_s = time.monotonic()
        self.limits = TenantLimits(parse_limits(limits), self.plane, self.loop, ttl_s)  # type: ignore[arg-type]

    def exchange(self, **how: Any) -> None:
        self.limits._timer._fire()
        self.plane.answer(**how)
        self.loop.run_posted()


def test_the_chunk_that_crosses_a_limit_is_the_last() -> None:
    here = Played("team=10,*=1KiB")
    assert here.limits.why_not("team") is None
    here.exchange()
    here.limits.stored("team", 9)
    assert here.limits.why_not("team") is None
    here.limits.stored("team", 9)
    why = here.limits.why_not("team")
    assert why is not None
    assert "team has used the 10 of its --tenant-bytes" in why
    assert here.limits.why_not("another") is None
    here.limits.stored("another", 1024)
    here.exchange()
    assert here.limits.why_not("another") is not None
    assert here.limits.why_not("none") is None, "whose it is was not said"
    here.limits.stored("none", 1 << 40)
    assert here.limits.why_not("none") is None


def test_nothing_is_asked_about_a_tenant_without_a_limit() -> None:
    here = Played("team=10")
    here.limits.stored("another", 100)
    assert here.limits.why_not("another") is None
    assert here.limits._timer._due_s == math.inf
    assert Tenants().admits("team")


def test_accounts_are_read_at_once_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_EVERY_S", 1e6)
    here = Played("*=100")
    here.limits.why_not("team")
    assert here.limits._timer._due_s <= time.monotonic()
    here.exchange()
    here.limits.why_not("team")
    first_s = here.limits._timer._due_s
    assert first_s > time.monotonic()
    here.limits.stored("another", 5)
    assert here.limits._timer._due_s == first_s, "one exchange for all"
    here.exchange()
    assert here.limits._timer._due_s == math.inf, "nothing is pending"


def test_what_agents_add_is_read_by_the_others() -> None:
    plane = PlayedPlane()
    first, second = Played("*=100", plane=plane), Played("*=100", plane=plane)
    first.limits.stored("team", 60)
    first.exchange()
    second.limits.stored("team", 50)
    assert second.limits.why_not("team") is None, "it knows only of its own"
    second.exchange()
    assert second.limits.used_by("team") == 110
    assert second.limits.why_not("team") is not None
    assert first.limits.why_not("team") is None
    first.exchange()
    assert first.limits.why_not("team") is not None
    assert sum(plane.numbers.values()) == 110, "nothing is added twice"


def test_accounts_read_together_are_each_their_tenants_own() -> None:
    here = Played("*=100")
    assert here.plane.adds_up
    for tenant in "ab":
        here.limits.why_not(tenant)
    here.limits._timer._fire()
    keys = here.plane.asked[0][0]
    oldest = keys[BUCKETS], keys[2 * BUCKETS + 1]
    here.plane.numbers = dict(zip(oldest, (7, 40), strict=True))
    here.plane.answer()
    here.loop.run_posted()
    assert [here.limits.used_by(tenant) for tenant in "ab"] == [7, 40]
    here.limits.why_not("a")
    here.exchange()
    assert here.limits.used_by("b") == 40, "although nobody has asked"


def test_an_account_that_was_never_read_is_not_full() -> None:
    here = Played("*=100")
    here.limits.stored("team", 500)
    assert here.limits.why_not("team") is None
    here.exchange(lost=3)  # of an earlier bucket: the sum is not known, but it was added
    assert here.limits.used_by("team") is None
    here.limits.why_not("team")
    here.exchange()
    assert here.limits.used_by("team") == 500
    assert here.limits.why_not("team") is not None


@pytest.mark.parametrize("how", [{"is_up": False}, {"lost": 0}, {"lost": 3}, {"refused": 0}])
def test_what_was_known_last_holds(how: dict[str, Any]) -> None:
    """One silent shard, a server that refuses, or none at all: no limit is lifted."""
    here = Played("*=100")
    here.limits.why_not("team")
    here.exchange()
    here.limits.stored("team", 60)
    for _ in range(3):
        here.limits.why_not("team")
        here.exchange(**how)
    assert here.limits.used_by("team") == 60
    here.limits.stored("team", 60)
    assert here.limits.why_not("team") is not None
    here.exchange(**how)
    assert here.limits.used_by("team") == 120
    assert here.limits.why_not("team") is not None


def test_a_lost_addition_is_given_up_a_refused_one_is_not() -> None:
    here = Played("*=100")
    here.limits.stored("team", 60)
    for _ in range(3):
        here.exchange(refused=0)
    assert sum(here.plane.numbers.values()) == 0
    here.exchange()
    assert here.limits.used_by("team") == sum(here.plane.numbers.values()) == 60
    here.limits.stored("team", 7)
    here.limits._timer._fire()
    (keys, amounts, _, done) = here.plane.asked.pop()
    here.plane.numbers[keys[0]] += amounts[keys[0]]
    done(NumbersResult(CallOutcome.TIMED_OUT))
    here.loop.run_posted()
    for _ in range(3):
        here.limits.why_not("team")
        here.exchange()
    assert here.limits.used_by("team") == 67


@pytest.mark.parametrize(("ttl_s", "period_s"), [(0, DAY_S), (3600, 3600), (1, BUCKETS)])
def test_accounts_end_with_the_chunks(ttl_s: int, period_s: int) -> None:
    here = Played("*=100", ttl_s)
    here.limits.stored("team", 1)
    here.limits._timer._fire()
    (keys, amounts, account_ttl_s, _) = here.plane.asked[0]
    assert account_ttl_s == period_s * (BUCKETS + 1) // BUCKETS
    assert [*amounts] == keys[:1]
    assert len({*keys}) == BUCKETS + 1
    assert all(key.startswith(b"p:lmcr2:tenant:") and b"team" not in key for key in keys)


def test_a_salt_a_request_does_not_grow_without_bound() -> None:
    here = Played("*=100")
    for number in range(30):
        for other in range(500):
            here.limits.stored(f"{number} {other}", 1)
        here.exchange(is_up=False)
    assert len(here.limits._known) < 6000
    assert len(here.limits._pending) < 6000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("team", "'team' is no limit: write NAME=SIZE"),
        ("none=1GiB", "'none=1GiB' is no limit"),
        ("a=1,a=2", "a is set twice"),
        ("a=much", "--tenant-bytes a: 'much' is not a size"),
    ],
)
def test_limits_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_limits(text)


def test_limits() -> None:
    assert parse_limits("a=b=1GiB, *=5") == {"a=b": 1 << 30, "*": 5}


# With servers

# Accounts are read more often.
SOON = {"lmcache_redis.agent.limits._EVERY_S": 0.2}


def store(engine: Engine, name: str) -> None:
    prompt = block_hashes(name, 8)
    engine.lookup(name, prompt)
    engine.store(name, prompt, range(8))
    engine.scheduler.end_session(name)


def used(agent: AgentServer, tenant: str) -> Any:
    return agent.status()["tenants"][tenant]["used_bytes"]


@pytest.mark.servers
def test_two_agents_share_an_account(start: Starts) -> None:
    how = {"constants": SOON, "tenant_bytes": "team=300KiB"}
    first, of_first = start("a", **how)
    second, of_second = start("b", **how)
    of_first.tenant = of_second.tenant = "team"
    store(of_first, "first")
    wait_until(lambda: first.counter("stored_chunks") == 2, what="two chunks")
    nbytes = first.counter("stored_bytes")
    assert 100 << 10 < nbytes < 300 << 10
    wait_until(lambda: used(first, "team") == nbytes, what="its account")
    # It is there: neither written nor counted again.
    of_second.store("first", block_hashes("first", 8), range(8))
    wait_until(lambda: second.counter("skipped_chunks") == 2, what="a store of the same")
    wait_until(lambda: used(second, "team") == nbytes, what="the account of the first")
    store(of_second, "second")
    wait_until(lambda: used(second, "team") == 2 * nbytes, what="both")
    store(of_second, "third")
    assert second.counter("drop_quota") == 2
    why = "\n".join(request_lines(ControlClient(second.endpoint, 10).why("third", 1), 0.0))
    assert "tenant team has used the 300KiB of its --tenant-bytes" in why
    assert second.status()["tenants"]["team"]["dropped_chunks"] == 2
    of_second.tenant = "another"
    store(of_second, "of another")
    wait_until(lambda: second.counter("stored_chunks") == 4, what="those of another")
    assert of_second.lookup("again", block_hashes("first", 8)) == 128, "nothing is deleted"
    assert "incrby" in second.status()["redis"]["commands"]
    assert second.status()["tenants"]["another"]["limit_bytes"] is None
    # The first has stored nothing since, and learns of it with its next store.
    store(of_first, "fourth")
    wait_until(lambda: (used(first, "team") or 0) >= 2 * nbytes, what="what the second wrote")
    store(of_first, "fifth")
    assert first.counter("drop_quota") in (2, 3, 4), "or chunks of the fourth, too"


@pytest.mark.servers
def test_only_redis_is_withheld_and_who_has_room_brings_it(start: Starts, tmp_path: Path) -> None:
    how = {"tenant_bytes": "full=1", "disk_path": tmp_path / "disk", "disk_size": "64MiB"}
    agent, engine = start("a", **how)
    engine.tenant = "full"
    store(engine, "first")
    wait_until(lambda: used(agent, "full"), what="its account")
    # Or one, where the second chunk's turn came when the first had been counted.
    first = agent.counter("stored_chunks")
    assert first in (1, 2)
    prompt = block_hashes("second", 8)
    for stored, present in ((2, 0), (2, 2)):
        engine.lookup("second", prompt)
        engine.store("second", prompt, range(8))
        (request,) = ControlClient(agent.endpoint, 10).why("second", 1)["requests"]
        found = [request["parts"][each] for each in ("stored", "present", "dropped")]
        assert found == [stored, present, 0]
    assert engine.lookup("again", prompt) == 128, "from the host pool"
    wait_until(lambda: agent.counter("disk_stored_chunks") == 4, what="both on the disk")
    assert (agent.counter("stored_chunks"), agent.counter("drop_quota")) == (first, 4 - first)
    engine.tenant = "another"
    engine.store("third", prompt, range(8))
    wait_until(lambda: agent.counter("stored_chunks") == first + 2, what="who has room")
    tenants = agent.status()["tenants"]
    full, another = tenants["full"], tenants["another"]
    assert (full["dropped_chunks"], another["dropped_chunks"]) == (4 - first, 0)
    assert another["stored_bytes"] * first == full["stored_bytes"] * 2 > 0


@pytest.mark.servers
def test_time_frees_an_account(start: Starts) -> None:
    four = {"lmcache_redis.agent.limits.BUCKETS": 4}  # of a second each
    agent, engine = start(constants=SOON | four, tenant_bytes="*=1", ttl_s=4)
    engine.tenant = "team"
    store(engine, "first")
    wait_until(lambda: used(agent, "team"), what="its account")
    first = agent.counter("stored_chunks")
    store(engine, "second")
    assert agent.counter("drop_quota") == 4 - first

    def is_stored_again() -> bool:
        store(engine, "third")
        return agent.counter("stored_chunks") > first

    wait_until(is_stored_again, what="room for another")
    assert json.dumps(agent.status()).count("--tenant-bytes") == 0


@pytest.mark.servers
def test_a_user_without_the_right_keeps_no_limit(start: Starts, redis_server: RedisServer) -> None:
    url = documented_url(redis_server)
    agent, engine = start(url=url, constants=SOON, tenant_bytes="*=1")
    engine.tenant = "team"
    store(engine, "first")
    wait_until(lambda: agent.status()["redis"]["refused"]["NOPERM"], what="a refusal")

    def is_stored() -> bool:
        for name in ("first", "second"):  # until Redis has refused, one chunk is the limit
            store(engine, name)
        return agent.counter("stored_chunks") == 4

    wait_until(is_stored, what="what nothing limits")
    assert engine.lookup("hit", block_hashes("first", 8)) == 128
