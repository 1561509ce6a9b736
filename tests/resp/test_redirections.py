# SPDX-License-Identifier: Apache-2.0
"""What a cluster redirects: where it leads (pure), and real servers while slots move."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from lmcache_redis.resp.maps import ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.routes import Lead, Redirect, Redirected, Routes, parse_redirect, slot_of
from lmcache_redis.seal import SealKeys
from lmcache_redis.tiers import CallOutcome, ReadOutcome, WriteOutcome
from tests.resp.helpers import (
    Chunk,
    check_loads,
    check_moves,
    check_stores,
    describe,
    exists,
    read,
    refresh,
    remove,
    running,
    scan,
    wait_until,
    write,
)
from tests.servers import RedisServer
from tests.topologies import Cluster, keys_on, running_cluster

SERVERS = tuple(Endpoint(Transport.TCP, host="h", port=port) for port in (1, 2, 3))
NODES = {server: f"node-{server.port}" for server in SERVERS}
A, B, C = NODES.values()
# The third server is known, but not of the map.
MAP = ServerMap(SERVERS[:2], ((0, 9999, 0), (10_000, 16_000, 1)))
SLOT_OF_A = 5


def routes(of: ServerMap = MAP) -> Routes[str]:
    return Routes(of, NODES)


def redirected(
    text: str,
    sent: Routes[str],
    *,
    slot: int = SLOT_OF_A,
    is_write: bool = False,
    is_tried: bool = False,
) -> Redirected[str]:
    return Redirected(parse_redirect(text), slot, A, "h", sent, is_write, is_tried)


# -------------------------------------------------------------------- pure


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MOVED 3999 127.0.0.1:6381", Redirect(False, "127.0.0.1", 6381)),
        ("ASK 1 a.host.name:1", Redirect(True, "a.host.name", 1)),
        ("MOVED 5 ::1:7000", Redirect(False, "::1", 7000)),
        ("MOVED 5 :7000", Redirect(False, "", 7000)),
        ("MOVED 5 h:7000 more words", Redirect(False, "h", 7000)),
        ("MOVED 5 h", None),
        ("MOVED h:1", None),
        ("MOVED 5 h:7000x", None),
        ("MOVED", None),
        ("ERR MOVED 5 h:1", None),
        ("", None),
    ],
)
def test_what_a_redirection_says(text: str, found: Redirect | None) -> None:
    assert parse_redirect(text) == found


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("address", ["h:2", ":2"])
def test_moved_to_a_server_of_the_map_changes_its_slot(address: str, is_write: bool) -> None:
    sent = routes()
    step = redirected(f"MOVED 5 {address}", sent, is_write=is_write)
    assert step.lead(sent) == Lead(to=B, moves_to=B)
    now = sent.with_slot(SLOT_OF_A, B)
    assert (sent.node_of_slot(SLOT_OF_A), now.node_of_slot(SLOT_OF_A)) == (A, B)
    assert [now.node_of_slot(slot) for slot in (4, 6, 10_000)] == [A, A, B]
    assert step.lead(now) == Lead(to=B), "it is known already"


def test_moved_to_any_other_server_waits_for_a_map_that_names_it() -> None:
    step = redirected("MOVED 5 h:3", routes())
    assert step.lead(routes()) == Lead(waits=True)
    with_c = ServerMap(SERVERS, ((0, 9999, 2), (10_000, 16_000, 1)))
    assert step.lead(routes(with_c)) == Lead(to=C)
    # Of a node that has not heard of it yet.
    assert step.lead(routes(MAP)) == Lead(waits=True)
    # The slot has gone elsewhere.
    assert step.lead(routes(ServerMap(SERVERS[1:2], ((0, 16_000, 0),)))) == Lead(to=B)


def test_a_redirection_from_before_a_map_changes_nothing_in_it() -> None:
    step = redirected("MOVED 5 h:2", routes())
    assert step.lead(routes(MAP._replace(servers=SERVERS[:2]))) == Lead(to=B)


def test_a_slot_that_no_server_had_is_that_of_who_is_named() -> None:
    sent = routes()
    step = redirected("MOVED 16001 h:2", sent, slot=16_001)
    assert step.lead(sent) == Lead(to=B, moves_to=B)


def test_a_second_redirection_is_not_followed_but_believed() -> None:
    sent = routes()
    assert redirected("MOVED 5 h:2", sent, is_tried=True).lead(sent) == Lead(moves_to=B)
    assert redirected("MOVED 5 h:3", sent, is_tried=True).lead(sent) == Lead()
    assert redirected("ASK 5 h:2", sent, is_tried=True).lead(sent).to is None


def test_ask_is_for_reads_and_for_servers_of_the_map() -> None:
    sent = routes()
    assert redirected("ASK 5 h:2", sent).lead(sent) == Lead(to=B, is_asking=True)
    assert redirected("ASK 5 h:2", sent, is_write=True).lead(sent).to is None
    assert redirected("ASK 5 h:3", sent).lead(sent).to is None
    # The move has ended since: not only a read may go there.
    assert redirected("ASK 5 h:2", sent, is_write=True).lead(sent.with_slot(5, B)) == Lead(to=B)


@pytest.mark.parametrize("text", ["MOVED 5 h:1", "MOVED 5 :1", "ASK 5 h:1", "MOVED 5 h", "MOVED"])
def test_a_redirection_to_itself_or_to_nowhere_leads_nowhere(text: str) -> None:
    assert redirected(text, routes()).lead(routes()).to is None


def test_one_server_redirects_to_nobody() -> None:
    single = Routes(ServerMap(SERVERS[:1]), NODES)
    assert redirected("MOVED 5 h:2", single).lead(single) == Lead()


# ------------------------------------------------------------------ a real cluster

pytestmark = pytest.mark.servers

SLOT = 4096
BIG = 100_000


def chunks(count: int) -> list[Chunk]:
    return [Chunk(n, BIG, SLOT, seed=n) for n in range(count)]


def first_on(cluster: Cluster, number: int, count: int) -> list[Chunk]:
    """Chunks whose stripe 0 a node has, each in a slot of its own."""
    found: dict[int, Chunk] = {}
    for chunk in chunks(200):
        first = chunk.stripe_keys()[0]
        if cluster.node_of(first) is cluster.nodes[number]:
            found.setdefault(slot_of(first), chunk)
        if len(found) == count:
            return [*found.values()]
    raise AssertionError("too few")


def slots_on(cluster: Cluster, number: int, stored: list[Chunk]) -> list[int]:
    """The slots of chunks that a node has."""
    node = cluster.nodes[number]
    return sorted({slot_of(c.key) for c in stored if cluster.node_of(c.key) is node})


def test_a_slot_that_has_moved_costs_nothing(cluster: Cluster) -> None:
    stored = first_on(cluster, 1, 20)
    source, target = cluster.nodes[1:]
    keys = [chunk.key for chunk in stored]
    with running(cluster.url) as plane:
        check_stores(plane, *stored)
        slots = iter(slots_on(cluster, 1, stored))
        looked_up = calls(cluster, "cluster|slots")

        def move(count: int) -> None:
            moved = [*itertools.islice(slots, count)]
            assert len(moved) == count
            for slot in moved:
                cluster.move(slot, source, target)

        move(5)
        check_loads(plane, *stored)
        move(5)
        assert refresh(plane, *stored)[:2] == (CallOutcome.DONE, [True] * 20)
        move(5)
        new = [Chunk(chunk.number, BIG, SLOT, seed=100 + chunk.number) for chunk in stored]
        check_moves(plane, *new)
        move(1)
        assert exists(plane, keys)[:2] == (CallOutcome.DONE, [True] * 20)
        move(1)
        assert scan(plane, keys) == (CallOutcome.DONE, 20)
        move(1)
        assert None not in describe(plane, keys).frames
        move(1)
        for chunk in stored:
            assert remove(plane, chunk)[:2] == (CallOutcome.DONE, chunk.stripe_count)
        assert sum(keys_on(cluster.nodes)) == 0
        assert calls(cluster, "cluster|slots") - looked_up < 5, "not for every slot"


def calls(cluster: Cluster, command: str) -> int:
    """How often the nodes that tests do not ask for the slots have run a command."""
    stats = [node.command("INFO", "commandstats") for node in cluster.nodes[1:]]
    return sum(each.get(f"cmdstat_{command}", {}).get("calls", 0) for each in stats)


@pytest.mark.parametrize("seal_keys", [None, SealKeys([bytes(32)])], ids=["plain", "sealed"])
def test_a_slot_that_is_moving_is_read_at_both_ends(
    cluster: Cluster, seal_keys: SealKeys | None
) -> None:
    stored, source, target = first_on(cluster, 1, 6), *cluster.nodes[1:]
    keys = [chunk.key for chunk in stored]
    with running(cluster.url, seal_keys=seal_keys) as plane:
        check_stores(plane, *stored)
        slots = slots_on(cluster, 1, stored)
        for number, slot in enumerate(slots):
            cluster.begin_move(slot, source, target)
            if number % 3:
                moved = cluster.move_keys(slot, source, target, 99 if number % 3 == 1 else 10)
                assert moved == (stored[0].stripe_count if number % 3 == 1 else 10)
        check_loads(plane, *stored)
        assert refresh(plane, *stored)[:2] == (CallOutcome.DONE, [True] * 6)
        assert exists(plane, keys)[:2] == (CallOutcome.DONE, [True] * 6)
        assert scan(plane, keys) == (CallOutcome.DONE, 6)
        lost = slots[1]
        with target.client() as client:
            for key in [key for chunk in stored for key in chunk.stripe_keys()]:
                if slot_of(key) == lost:
                    client.execute_command("ASKING")
                    assert client.execute_command("UNLINK", key) == 1
        found = refresh(plane, *stored)
        assert found.outcome is CallOutcome.DONE
        assert False in found.present, "absent at both ends"
        assert None not in found.present
        assert ReadOutcome.MISSING in read(plane, *(chunk.empty() for chunk in stored))


def test_what_is_moving_is_not_written_and_is_when_it_has_moved(cluster: Cluster) -> None:
    (chunk,), source, target = first_on(cluster, 1, 1), *cluster.nodes[1:]
    last = next(key for key in reversed(chunk.stripe_keys()) if cluster.node_of(key) is source)
    assert last != chunk.stripe_keys()[0]
    with running(cluster.url) as plane:
        cluster.begin_move(slot_of(last), source, target)
        assert write(plane, chunk) == [WriteOutcome.UNAVAILABLE]
        assert read(plane, chunk.empty()) == [ReadOutcome.MISSING], "no stripe 0"
        assert remove(plane, chunk, stripe_count=chunk.stripe_count)[0] is CallOutcome.UNAVAILABLE
        cluster.end_move(slot_of(last), source, target)
        check_moves(plane, chunk)


def fail_over(master: RedisServer, replica: RedisServer) -> None:
    """As planned: no data is lost."""
    wait_until(lambda: replica.command("DBSIZE") == master.command("DBSIZE"))

    def is_promoted() -> bool:
        if b"myself,master" in replica.command("CLUSTER", "NODES"):
            return True
        # On a busy machine the servers give it up.
        with suppress(redis.exceptions.ResponseError):
            replica.command("CLUSTER", "FAILOVER")
        time.sleep(0.1)
        return False

    wait_until(is_promoted)
    wait_until(lambda: b"myself,slave" in master.command("CLUSTER", "NODES"))


def test_an_idle_plane_hits_after_planned_failovers(tmp_path: Path) -> None:
    """The first prompt too: the map does not name the server that it is redirected to."""
    stored = chunks(64)
    with running_cluster(tmp_path) as cluster:
        master = cluster.nodes[1]
        replica = cluster.add_replica(master)
        with running(cluster.url) as plane:
            check_stores(plane, *stored)
            fail_over(master, replica)
            check_loads(plane, *stored)


def test_resharding_under_load_tears_and_rewrites_nothing(cluster: Cluster) -> None:
    """Several planes load, ask about and store chunks, as agents do, while many slots move."""
    stored = chunks(12)
    source, target = cluster.nodes[1:]
    contents = [chunk.content for chunk in stored]
    over, failures = threading.Event(), list[str]()
    loads, written = Counter[ReadOutcome](), Counter[WriteOutcome]()

    def work(number: int) -> None:
        try:
            with running(cluster.url) as plane:
                for turn in itertools.count():
                    if over.is_set():
                        return
                    loaded = [chunk.empty() for chunk in stored]
                    outcomes = read(plane, *loaded)
                    loads.update(outcomes)
                    for chunk, outcome, content in zip(loaded, outcomes, contents, strict=True):
                        if outcome is ReadOutcome.LOADED and chunk.content != content:
                            failures.append("wrong bytes")
                    found = refresh(plane, *stored)
                    # What is known to be absent is written, as by the agents.
                    lacking = [
                        c for c, there in zip(stored, found.present, strict=False) if there is False
                    ]
                    written.update(write(plane, *lacking) if lacking else ())
                    own = Chunk(10_000 + 1000 * number + turn, BIG, SLOT, seed=turn)
                    if write(plane, own) == [WriteOutcome.STORED]:
                        back = own.empty()
                        is_loaded = read(plane, back) == [ReadOutcome.LOADED]
                        if is_loaded and back.content != own.content:
                            failures.append("wrong bytes of its own")
        except BaseException as error:
            failures.append(repr(error))
            raise

    with running(cluster.url) as plane:
        check_stores(plane, *stored)
        workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for worker in workers:
            worker.start()
        try:
            for slot in slots_on(cluster, 1, stored)[:60]:
                cluster.move(slot, source, target)
        finally:
            over.set()
            for worker in workers:
                worker.join()
        assert not failures
        assert not written, "nothing was absent"
        assert set(loads) <= {ReadOutcome.LOADED, ReadOutcome.UNAVAILABLE}
        assert loads[ReadOutcome.LOADED] > 10 * loads[ReadOutcome.UNAVAILABLE]
        check_loads(plane, *stored)
