# SPDX-License-Identifier: Apache-2.0
"""Whom to ask and whom to believe, over random histories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_redis.resp.maps import Answer, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint, Transport
from lmcache_redis.resp.sources import PANEL, Doubt, Sources

pytestmark = pytest.mark.unit
few = settings(max_examples=40)  # each has many rounds

NODES = [Endpoint(Transport.TCP, f"node-{number}", 1) for number in range(9)]
SEEDS = [Endpoint(Transport.TCP, f"seed-{number}", 1) for number in range(3)]


def map_of(*servers: Endpoint, half: int = 8192) -> ServerMap:
    """half: maps of the same servers may differ."""
    return ServerMap(servers, ((0, half, 0), (half + 1, 16383, len(servers) - 1)))


@dataclass
class World:
    """What each source would say now; those that are missing do not answer.

    heard: the last that each that was asked said since the map changed; None: it did not answer.
    """

    sources: Sources
    says: dict[Endpoint, Answer] = field(default_factory=dict)
    asked: list[Endpoint] = field(default_factory=list)
    heard: dict[Endpoint, Answer | None] = field(default_factory=dict)

    def look_up(self, doubt: Doubt = Doubt.NONE, down: Sequence[Endpoint] = ()) -> list[Endpoint]:
        """Who was asked in a round."""
        self.asked = []
        self.sources.begin(doubt, down)
        while (source := self.sources.next_source()) is not None:
            assert source not in self.asked, "nobody is asked twice in a round"
            self.asked.append(source)
            self.heard[source] = self.says.get(source)
            if source in self.says:
                self.sources.answered(source, self.says[source])
            else:
                self.sources.failed(source)
        self.sources.end()
        assert len(self.sources.panel) <= PANEL
        assert not {*self.sources.panel} & ({*self.asked} - {*self.says})
        return self.asked

    @property
    def map(self) -> ServerMap | None:
        return None if self.sources.belief is None else self.sources.belief.map


def sentinels(count: int = 3, seed: int = 0) -> World:
    return World(Sources(NODES[:count], True, random.Random(seed)))


def cluster(seed: int = 0) -> World:
    return World(Sources(SEEDS, False, random.Random(seed)))


OLD, NEW, OTHER = (ServerMap((node,)) for node in NODES[6:9])
chances = st.integers(0, 1 << 32)


@few
@given(chances, st.sampled_from([(1, ""), (2, "s_down"), (1, "s_down"), (None, "")]))
def test_a_sentinel_that_is_outdated_is_left(seed: int, old: tuple[int | None, str]) -> None:
    """It was alone at first. The others know better by epoch, by what they see, or are more."""
    world = sentinels(3, seed)
    world.says[NODES[0]] = Answer(OLD, *old)
    world.look_up()
    assert world.map == OLD
    epoch = None if old[0] is None else 2
    world.says |= dict.fromkeys(NODES[1:3], Answer(NEW, epoch))
    for _ in range(2):
        world.look_up(Doubt.BROKEN)
    assert world.map == NEW
    for number in range(40):
        world.look_up([Doubt.NONE, Doubt.BROKEN][number % 2])
        assert world.map == NEW


@few
@given(chances)
def test_a_cluster_is_asked_where_it_is_not_cut_off(seed: int) -> None:
    before, after = map_of(*NODES[:6]), map_of(NODES[6], *NODES[1:6])
    world = cluster(seed)
    world.says = dict.fromkeys([*NODES[:6], SEEDS[0]], Answer(before, 3))
    world.look_up()
    assert world.look_up()[0] in NODES
    # Half of the nodes do not hear of the other half, which knows the new one.
    world.says |= dict.fromkeys(NODES[:3], Answer(before, 3, "cluster_state fail"))
    world.says |= dict.fromkeys(NODES[3:7], Answer(after, 4))
    for _ in range(2):
        world.look_up(Doubt.BROKEN)
    assert world.map == after
    for _ in range(40):
        world.look_up(Doubt.BROKEN)
        assert world.map == after


@few
@given(chances)
def test_clients_spread_and_change_and_leave_the_seeds(seed: int) -> None:
    world = cluster(seed)
    world.says = dict.fromkeys([*NODES, *SEEDS], Answer(map_of(*NODES), 1))
    world.look_up()
    told = [world.look_up() for _ in range(60)]
    assert all(len(asked) == 1 and asked[0] in NODES for asked in told)
    assert len({asked[0] for asked in told}) > 1
    changes = sum(one != other for one, other in itertools.pairwise(told))
    assert changes < 5


@given(chances)
def test_all_nodes_move(seed: int) -> None:
    world = cluster(seed)
    world.says = dict.fromkeys([*NODES[:3], *SEEDS], Answer(map_of(*NODES[:3]), 7))
    world.look_up()
    for node in NODES[:3]:
        del world.says[node]
    after = Answer(map_of(*NODES[3:6]), 7)
    world.says |= dict.fromkeys([*NODES[3:6], *SEEDS], after)
    world.look_up(Doubt.BROKEN, NODES[:3])
    assert world.map == after.map


@given(chances)
def test_a_cluster_that_begins_anew(seed: int) -> None:
    """Its epochs, too. While the map works it stays; then nobody knows the old epoch any more."""
    world = cluster(seed)
    world.says = dict.fromkeys([*NODES, *SEEDS], Answer(map_of(*NODES), 70))
    world.look_up()
    again = Answer(map_of(*reversed(NODES)), 1)
    world.says = dict.fromkeys([*NODES, *SEEDS], again)
    rounds = 0
    while world.map != again.map:
        world.look_up(Doubt.BROKEN)
        rounds += 1
        assert rounds < 8


@few
@pytest.mark.parametrize("doubt", [Doubt.NONE, Doubt.MOVED])
@given(seed=chances)
def test_a_map_that_works_stays_while_its_epoch_may_be_known(doubt: Doubt, seed: int) -> None:
    """One Sentinel is set up anew. That the others do not answer says nothing of the epoch."""
    world = sentinels(6, seed)
    world.says = dict.fromkeys(NODES[:6], Answer(NEW, 2))
    world.look_up()
    world.says = {world.sources.teller: Answer(OLD, 1)}
    for _ in range(20):
        world.look_up(doubt)
        assert world.map == NEW
    world.says = dict.fromkeys(NODES[:6], Answer(OLD, 1))
    for _ in range(100):
        world.look_up(doubt)
    assert world.map == OLD


def test_who_knew_less_than_a_greater_epoch_is_asked_again() -> None:
    """The belief's epoch falls when a source that is sure confirms its map."""
    world = sentinels(2)
    world.says = {NODES[0]: Answer(NEW, 5, "s_down")}
    world.look_up()
    world.says[NODES[1]] = Answer(OLD, 3, "s_down")
    world.look_up()
    world.says[NODES[0]] = Answer(NEW, 1)
    world.look_up()
    assert world.sources.belief == Answer(NEW, 1)
    world.says[NODES[0]] = Answer(OTHER, 0)
    assert NODES[1] in world.look_up()
    assert world.map == NEW


epochs = st.none() | st.integers(0, 4)
doubts = st.sampled_from(["", "s_down", "o_down"])
answers_of_one_map = st.builds(Answer, st.just(NEW), epochs, doubts)


@given(answers_of_one_map, st.lists(answers_of_one_map, max_size=PANEL), st.sampled_from(Doubt))
@example(Answer(NEW, 2, "s_down"), [Answer(NEW, 3, "s_down"), Answer(NEW, 1)], Doubt.BROKEN)
def test_the_order_of_answers_does_not_matter(
    belief: Answer, answers: list[Answer], doubt: Doubt
) -> None:
    found = set()
    for order in itertools.permutations(zip(NODES, answers, strict=False)):
        sources = sentinels(PANEL).sources
        sources.belief = belief
        sources.begin(doubt)
        for source, answer in order:
            sources.answered(source, answer)
        assert not sources.end()
        found.add(sources.belief)
    (after,) = found
    assert after in {belief, *answers}
    # Less doubt, or a newer epoch. An older one only if nobody says a newer one.
    known = [each.epoch for each in (belief, *answers) if each.epoch is not None]
    if after.epoch is not None and belief.epoch is not None and after.epoch < belief.epoch:
        assert belief.doubt
        assert not after.doubt
        assert max(known) == belief.epoch
    if any(not each.doubt and each.epoch == belief.epoch for each in answers):
        assert not after.doubt


def with_gap(*servers: Endpoint, first: int = 0) -> ServerMap:
    """A hundred slots have no server."""
    return ServerMap(servers, ((first, 8192 + first, 0), (8293 + first, 16383, len(servers) - 1)))


@given(chances, st.sampled_from([*Doubt]))
def test_who_knows_the_servers_of_more_slots_is_believed(seed: int, doubt: Doubt) -> None:
    """During a failover, of one epoch."""
    world = cluster(seed)
    nodes = NODES[:3]
    whole, partial = map_of(*nodes), with_gap(*nodes)
    world.says = {each: Answer(partial, 5) for each in (*SEEDS, *nodes)}
    world.look_up()
    assert world.map == partial
    world.says[nodes[1]] = Answer(whole, 5)
    world.look_up(doubt)
    assert world.map == whole
    for _ in range(20):
        world.look_up(doubt)
        assert world.map == whole
    # Who says less of a newer epoch is believed nevertheless.
    world.says = {each: Answer(with_gap(*nodes), 6) for each in nodes}
    world.look_up(doubt)
    assert world.map == partial


@few
@given(chances, st.sampled_from([*Doubt]))
def test_slots_that_nobody_has_change_nothing_else(seed: int, doubt: Doubt) -> None:
    """An older epoch is not believed for its slots; equal maps do not take turns."""
    world = cluster(seed)
    nodes = NODES[:3]
    one, two = with_gap(*nodes), with_gap(*nodes, first=1)
    two = two._replace(ranges=((0, 0, 0), *(two.ranges or ())))
    assert one.unserved == two.unserved == 100
    world.says = {each: Answer(one, 5) for each in (*SEEDS, *nodes)}
    world.look_up()
    world.says[nodes[0]] = Answer(map_of(*nodes), 4)
    for _ in range(20):
        world.look_up(doubt)
        assert world.map == one
    world.says[nodes[0]] = Answer(two, 5)
    believed = []
    for _ in range(20):
        world.look_up()
        believed.append(world.map)
    assert len([pair for pair in itertools.pairwise(believed) if pair[0] != pair[1]]) <= 1


@few
@given(chances)
def test_slots_that_move_are_asked_for_at_one_node(seed: int) -> None:
    world = cluster(seed)
    world.says = dict.fromkeys([*NODES, *SEEDS], Answer(map_of(*NODES), 1))
    world.look_up()
    for half in range(1, 40):
        world.says = dict.fromkeys([*NODES, *SEEDS], Answer(map_of(*NODES, half=half), 1))
        assert len(world.look_up(Doubt.MOVED)) == 1
        assert world.map == map_of(*NODES, half=half)


def test_a_dead_server_without_news_costs_few_connections() -> None:
    world = cluster()
    world.says = dict.fromkeys(NODES, Answer(map_of(*NODES), 1))
    world.sources.belief = Answer(map_of(*NODES), 1)
    opened, kept = 0, set[Endpoint]()
    for _ in range(1000):
        asked = world.look_up(Doubt.BROKEN, NODES[:1])
        opened += len(set(asked) - kept)
        kept = set(world.sources.panel)
    assert opened < 60


# ------------------------------------------------------------- random histories


@dataclass(frozen=True)
class Event:
    """Some sources say something from now on (None: nothing), and then there are some rounds."""

    who: frozenset[int]
    says: tuple[int, int | None, str] | None
    doubt: Doubt
    rounds: int


@st.composite
def events(draw: Callable[..., object]) -> Event:
    who = draw(st.frozensets(st.integers(0, 5), min_size=1))
    said = st.tuples(
        st.integers(0, 3), st.none() | st.integers(0, 5), st.sampled_from(["", "", "s_down"])
    )
    doubt = draw(st.sampled_from(Doubt))
    return Event(who, draw(st.none() | said), doubt, draw(st.integers(1, 4)))  # type: ignore[arg-type]


def _knows_less(said: Answer | None, epoch: int, can_be_silent: bool) -> bool:
    if said is None:
        return can_be_silent
    return said.epoch is not None and said.epoch < epoch


# One source goes back to an older epoch, and the others do not answer.
ONE_GOES_BACK = [
    Event(frozenset([0]), None, Doubt.MOVED, 1),
    Event(frozenset([2]), (0, None, "s_down"), Doubt.NONE, 2),
    Event(frozenset([0]), (1, 1, ""), Doubt.NONE, 2),
    Event(frozenset([0]), (0, 0, ""), Doubt.NONE, 2),
    Event(frozenset([2]), None, Doubt.NONE, 1),
    Event(frozenset([1]), None, Doubt.NONE, 2),
    Event(frozenset([1]), (0, None, ""), Doubt.NONE, 1),
]
A_NEWER_DOUBT_BESIDE_AN_OLDER_EPOCH = [
    Event(frozenset([0]), (2, 1, ""), Doubt.NONE, 1),
    Event(frozenset([0, 2]), (2, 0, ""), Doubt.NONE, 1),
    Event(frozenset([0]), (2, 2, "s_down"), Doubt.NONE, 1),
]
MAPS = [map_of(*NODES[:6], half=half) for half in (1, 2, 3, 4)]


@given(st.lists(events(), max_size=20), chances, st.booleans())
@example(ONE_GOES_BACK, 1, False)
@example(A_NEWER_DOUBT_BESIDE_AN_OLDER_EPOCH, 0, False)
def test_random_histories(history: list[Event], seed: int, is_cluster: bool) -> None:
    sources = Sources(NODES[:6], not is_cluster, random.Random(seed))
    world = World(sources)
    useless: Endpoint | None = None
    for event in history:
        for number in event.who:
            if event.says is None:
                world.says.pop(NODES[number], None)
            else:
                index, epoch, doubt = event.says
                world.says[NODES[number]] = Answer(MAPS[index], epoch, doubt)
        for _ in range(event.rounds):
            before = sources.belief
            asked = world.look_up(event.doubt)
            after, heard = sources.belief, world.heard
            # Nobody who brought no news is asked twice in a row.
            assert useless is None or asked[0] != useless
            has_news = before is None or (after is not None and after.map != before.map)
            if has_news:
                world.heard = {}
            useless = None if event.doubt is Doubt.NONE or has_news else asked[-1]
            # If somebody answers at all, somebody is heard.
            assert bool(sources.answers) == bool(world.says) or len(asked) >= PANEL
            if before is None or after is None or after == before:
                continue
            if before.epoch is None or after.epoch is None or after.epoch >= before.epoch:
                continue
            # An older epoch: of who is sure, after one that nobody was sure of; or all were asked,
            # and none knows the newer one any more. Silence counts if the map does not work.
            can_be_silent = event.doubt is Doubt.BROKEN
            is_unknown = all(
                node in heard and _knows_less(heard[node], before.epoch, can_be_silent)
                for node in NODES[:6]
            )
            assert is_unknown or (before.doubt and not after.doubt)
    # In the end all agree, and one who was cut off does not.
    world.says = dict.fromkeys(NODES[1:6], Answer(MAPS[0], 9))
    world.says[NODES[0]] = Answer(MAPS[1], 1, "s_down")
    for _ in range(8):
        world.look_up(Doubt.BROKEN)
    for doubt in (*[Doubt.NONE] * 100, *[Doubt.BROKEN] * 10):
        assert world.map == MAPS[0]
        world.look_up(doubt)
