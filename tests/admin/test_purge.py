# SPDX-License-Identifier: Apache-2.0
"""What is chosen, what is removed, and above all what is not."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.admin.names import read_layout
from lmcache_redis.admin.purge import PurgeResult, Selection, choose, remove, steps_of
from lmcache_redis.admin.report import plan_lines, removal_lines
from lmcache_redis.admin.server import Primary, PrimaryServers, open_server
from lmcache_redis.admin.stripes import SeenChunk
from lmcache_redis.errors import ConfigError, RedisAuthError
from tests.admin.cache import Cached, age, carried_out, everything, purge, user_of
from tests.servers import RedisServer

ALL = Selection(everything=True)


def put(client: Any, *chunks: Cached) -> None:
    for chunk in chunks:
        chunk.put(client)


def of_model(*models: str) -> Selection:
    return Selection(models=frozenset(models))


def test_a_model_goes_and_the_others_stay(
    server: PrimaryServers, client: Any, redis_server: RedisServer
) -> None:
    gone = [Cached(n, rank=r) for n, r in itertools.product(range(3), range(2))]
    stay = [Cached(n, model="org/model-2") for n in range(3)] + [Cached(1, prefix=b"other:")]
    put(client, *stay)
    before = everything(redis_server)
    put(client, *gone)
    result = purge(server, of_model("org/model"))
    assert everything(redis_server) == before
    assert (result.chunks, result.stripes) == (6, 18)
    assert result.sizes == (sum(chunk.value_bytes for chunk in gone),) * 2
    assert not result.left
    assert result.seconds > 0


@pytest.mark.parametrize("digits", [16, 32, 64])
def test_a_layout_goes_and_the_others_stay(
    server: PrimaryServers, client: Any, digits: int
) -> None:
    gone = Cached(1, raw_namespace=digits == 32)
    stay = Cached(1, layout="second")
    put(client, gone, stay)
    layout = read_layout(gone.fingerprint.hex()[:digits].upper())
    assert purge(server, Selection(layouts=frozenset({layout}))).chunks == 1
    assert set(client.keys("*")) == set(stay.keys)


def test_conditions_add_up(server: PrimaryServers, client: Any) -> None:
    chunks = [Cached(1, model=m, layout=w) for m in ("a", "b") for w in ("first", "second")]
    put(client, *chunks)
    both = Selection(models=frozenset({"a"}), layouts=frozenset({chunks[0].name.layout}))
    assert purge(server, both).chunks == 1
    assert set(client.keys("*")) == {key for chunk in chunks[1:] for key in chunk.keys}


def test_idle_chunks_go(server: PrimaryServers, client: Any) -> None:
    old, new = Cached(1), Cached(2)
    put(client, old, new)
    for key in old.keys:
        age(client, key, 8 * 86_400)
    selection = Selection(idle_longer_than_s=7 * 86_400.0)
    # Looking twice changes nothing: a dry run must not make chunks look used.
    assert len(choose(server, b"", selection).chunks) == 1
    assert purge(server, selection).chunks == 1
    assert set(client.keys("*")) == set(new.keys)


def test_a_chunk_used_since_it_was_chosen_stays(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(1)
    chunk.put(client)
    age(client, chunk.keys[0], 5000)
    plan = choose(server, b"", Selection(idle_longer_than_s=1000.0))
    client.get(chunk.keys[0])
    result = carried_out(server, plan)
    assert (result.used_again, result.stripes) == (1, 0)
    assert set(client.keys("*")) == set(chunk.keys)


def test_an_idle_chunk_that_is_evicted_meanwhile_was_not_used(
    server: PrimaryServers, client: Any
) -> None:
    put(client, Cached(1), Cached(2))
    for key in Cached(1).keys + Cached(2).keys:
        age(client, key, 5000)
    plan = choose(server, b"", Selection(idle_longer_than_s=1000.0))
    client.delete(*Cached(1).keys, Cached(2).keys[0])
    result = carried_out(server, plan)
    assert (result.vanished, result.stored_again, result.used_again) == (4, 2, 0)
    assert set(client.keys("*")) == set(Cached(2).keys[1:])


def stored_ago(number: int, seconds: float) -> Cached:
    return Cached(number, stored_unix_ms=int((time.time() - seconds) * 1000))


def test_chunks_stored_long_ago_go_however_often_they_are_read(
    server: PrimaryServers, client: Any
) -> None:
    old, new = stored_ago(1, 31 * 86_400), stored_ago(2, 29 * 86_400)
    put(client, old, new)
    selection = Selection(stored_longer_than_s=30 * 86_400.0)
    assert [c.name.key.chunk_hash[-1] for c in choose(server, b"", selection).chunks] == [1]
    assert purge(server, selection).chunks == 1
    assert set(client.keys("*")) == set(new.keys)


def test_a_chunk_stored_anew_since_it_was_chosen_stays(server: PrimaryServers, client: Any) -> None:
    stored_ago(1, 1000).put(client)
    plan = choose(server, b"", Selection(stored_longer_than_s=500.0))
    again = stored_ago(1, 0)
    again.put(client)
    result = carried_out(server, plan)
    assert (result.stored_again, result.stripes) == (3, 0)
    assert set(client.keys("*")) == set(again.keys)


def test_a_header_that_cannot_be_read_is_of_no_age(server: PrimaryServers, client: Any) -> None:
    chunk = stored_ago(1, 1000)
    chunk.put(client)
    client.set(chunk.keys[0], "somebody else's")
    assert not choose(server, b"", Selection(stored_longer_than_s=500.0)).chunks


def test_under_doubt_nothing_is_removed(
    server: PrimaryServers, client: Any, redis_server: RedisServer
) -> None:
    """Values that are not ours, or not surely, under names that are; names that are not ours."""
    foreign = [Cached(number) for number in range(20, 27)]
    client.set(foreign[0].keys[0], "somebody else's")
    client.set(foreign[1].keys[0], b"")
    client.set(foreign[2].keys[0], foreign[3].value(0))
    client.set(foreign[3].keys[0], foreign[3].value(1))
    client.set(foreign[4].keys[0], Cached(24, layout="second").value(0))
    damaged = bytearray(foreign[5].value(0))
    damaged[300] ^= 1
    client.set(foreign[5].keys[0], bytes(damaged))
    client.lpush(foreign[6].keys[0], "a list")
    whole = Cached(1)
    for key in (b"lmcr2", b"lmcr2:", b"lmcr2:x", b"lmcr2X", b"Lmcr2:", b"lmcr1:", b"xlmcr2:"):
        client.set(key, whole.value(0))
    client.set(whole.keys[0] + b"\0", whole.value(0))
    client.set(whole.keys[0][:-1], whole.value(0))
    client.hset("lmcr2:a hash", "field", "value")
    before = everything(redis_server)
    whole.put(client)
    result = purge(server, ALL)
    assert everything(redis_server) == before
    assert (result.chunks, result.stripes) == (1, 3)
    assert sum(result.left.values()) == 5
    assert 0 < len(result.left_examples) <= 5


@pytest.mark.parametrize("prefix", [b"*:", b"a?[b]", b"\\", b"p\xff\0:"])
def test_a_prefix_is_no_pattern(server: PrimaryServers, client: Any, prefix: bytes) -> None:
    ours, plain, longer = (
        Cached(1, prefix=prefix), Cached(1, prefix=b"abb:"), Cached(1, prefix=b"x" + prefix)
    )  # fmt: skip
    put(client, ours, plain, longer)
    assert purge(server, ALL, prefix).chunks == 1
    assert set(client.keys("*")) == {*plain.keys, *longer.keys}


def test_stripe_0_goes_first(
    server: PrimaryServers, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, Cached(1), Cached(2))
    sent: list[bytes] = []
    ask_all = Primary.ask_all

    def recorded(node: Primary, commands: Any) -> Any:
        sent.extend(command[1] for command in commands if command[0] == "UNLINK")
        return ask_all(node, commands)

    monkeypatch.setattr(Primary, "ask_all", recorded)
    purge(server, ALL)
    indexes = [int.from_bytes(key[-2:], "big") for key in sent]
    assert indexes[:2] == [0, 0]
    assert sorted(indexes) == [0, 0, 1, 1, 2, 2]


def test_what_vanishes_meanwhile_is_counted(server: PrimaryServers, client: Any) -> None:
    put(client, Cached(1), Cached(2))
    plan = choose(server, b"", ALL)
    client.delete(*Cached(1).keys)
    result = PurgeResult()
    seen: list[tuple[str, int, int]] = []
    remove(server, plan, 1e6, result, lambda *said: seen.append(said))
    assert (result.chunks, result.stripes, result.vanished) == (1, 3, 3)
    assert seen == [("keys removed", 6, 6)]


def test_remains_without_stripe_0_go_too(server: PrimaryServers, client: Any) -> None:
    Cached(1).put(client, 1, 2)
    result = purge(server, of_model("org/model"))
    assert (result.chunks, result.stripes) == (1, 2)
    assert client.dbsize() == 0


def test_of_packed_chunks_both_sizes_are_said(server: PrimaryServers, client: Any) -> None:
    chunks = [Cached(number, packed_bytes=1000) for number in range(2)]
    put(client, *chunks)
    stored, plain = (2 * (chunks[0].value_bytes - less) for less in (2 * 3096, 0))
    plan = choose(server, b"", ALL)
    assert plan.sizes is not None
    assert plan.sizes.plain == plain
    assert plan.sizes.stored == pytest.approx(stored, abs=2)
    assert "6 keys, about 7.9 KiB (plain 19.9 KiB)" in next(plan_lines(plan, "here"))
    result = carried_out(server, plan)
    assert result.sizes == (stored, plain)
    assert "6 keys, 7.9 KiB (plain 19.9 KiB)" in next(removal_lines(result))


def test_a_user_who_may_not_remove(own_server: RedisServer) -> None:
    options = user_of(own_server, "+@read", "+ping")
    with own_server.client() as client, open_server(options) as server:
        Cached(1).put(client)
        with pytest.raises(RedisAuthError, match=r"unlink.* need \+@read and \+unlink"):
            purge(server, ALL)
        assert len(client.keys("*")) == 3


def test_a_user_who_may_not_see_idle_times(own_server: RedisServer) -> None:
    options = user_of(own_server, "+@read", "+unlink", "+ping", "-object")
    with own_server.client() as client, open_server(options) as server:
        Cached(1).put(client)
        with pytest.raises(ConfigError, match=r"needs \+object"):
            choose(server, b"", Selection(idle_longer_than_s=1.0))
        assert purge(server, of_model("org/model")).chunks == 1


def test_something_must_be_chosen_and_by_one_age() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Selection(idle_longer_than_s=1000.0, stored_longer_than_s=1000.0)
    with pytest.raises(ConfigError, match="select what to remove"):
        Selection()
    with pytest.raises(ConfigError, match="or --everything alone"):
        Selection(models=frozenset({"m"}), everything=True)


@pytest.mark.parametrize(("rate", "most"), [(1, 3), (100, 12), (1e6, 102)])
def test_a_step_has_whole_chunks(rate: float, most: int) -> None:
    chunks = [SeenChunk(Cached(n).name, 0b111) for n in range(70)]
    steps = list(steps_of(chunks, rate))
    assert [chunk for step in steps for chunk in step] == chunks
    assert max(sum(chunk.count for chunk in step) for step in steps) == most
    large = SeenChunk(Cached(70).name, (1 << 150) - 1)
    assert list(steps_of([large, chunks[0]], rate)) == [[large], [chunks[0]]]


def test_a_purge_keeps_its_pace(
    server: PrimaryServers, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, *map(Cached, range(4)))
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    plan = choose(server, b"", ALL)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr("lmcache_redis.admin.purge.time", clock)
    remove(server, plan, 10, PurgeResult())
    # The first chunk at once, each other when the keys of the one before it have had their time.
    assert slept == [0.0, *[pytest.approx(0.3)] * 3]
