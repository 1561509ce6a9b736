"""Which events follow from what the agent tells."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.reports.events import Event, Holdings

A, B, C = b"a", b"b", b"c"
Note = tuple[int, str, bool, bytes]


def remember(made: Holdings, name: bytes) -> list[Event]:
    chunk: Any = name.decode()  # what it says does not matter here
    return made.follow(name, lambda: chunk)


def holdings(groups: tuple[int, ...] = (0,), limit: int = 10) -> Holdings:
    made = Holdings(limit)
    assert made.begin(groups) == []
    for name in (A, B):
        assert remember(made, name) == []
    return made


@pytest.mark.parametrize(
    ("groups", "notes", "events"),
    [
        pytest.param((0,), [(0, "host", True, A)], ["+host 0 a"], id="stored"),
        pytest.param((0,), [(0, "host", True, A)] * 3, ["+host 0 a"], id="told again"),
        pytest.param((0,), [(0, "host", False, A)], [], id="was never there"),
        pytest.param(
            (0,), [(0, "host", True, A), (0, "host", False, A)], ["+host 0 a", "-host 0 a"],
            id="removed",
        ),
        pytest.param(
            (0,), [(0, "host", True, A), (0, "redis", True, A), (0, "host", False, A)],
            ["+host 0 a", "+redis 0 a", "-host 0 a"], id="tiers are apart",
        ),
        pytest.param((0,), [(0, "host", True, C)], [], id="of another engine"),
        pytest.param((0,), [(7, "host", True, A)], [], id="a part that is none"),
        pytest.param((0, 0), [(0, "host", True, A)], [], id="of one rank"),
        pytest.param(
            (0, 0), [(0, "host", True, A), (1, "host", True, A)], ["+host 0 a"], id="of all ranks"
        ),
        pytest.param(
            (0, 0), [(0, "host", True, A), (1, "redis", True, A)], [], id="in different tiers"
        ),
        pytest.param(
            (0, 0),
            [(0, "host", True, A), (1, "host", True, A), (0, "host", False, A),
             (1, "host", False, A), (1, "host", True, A), (0, "host", True, A)],
            ["+host 0 a", "-host 0 a", "+host 0 a"], id="one rank's part is enough to lose it",
        ),
        pytest.param(
            (0, 1), [(1, "host", True, A), (0, "host", True, A)], ["+host 1 a", "+host 0 a"],
            id="groups are apart",
        ),
        pytest.param(
            (0, 1, 0, 1), [(1, "host", True, B), (2, "host", True, B), (3, "host", True, B)],
            ["+host 1 b"], id="groups of ranks",
        ),
    ],
)  # fmt: skip
def test_events_of_changes(groups: tuple[int, ...], notes: list[Note], events: list[str]) -> None:
    made = holdings(groups)
    found = [event for note in notes if (event := made.changed(*note)) is not None]
    assert [_text(event) for event in found] == events


def _text(event: Event) -> str:
    sign = "+" if event.stored else "-"
    return f"{sign}{event.tier} {event.group} {event.chunk}"


def test_what_is_forgotten_counts_as_removed() -> None:
    made = holdings((0, 0), limit=2)
    for part in range(2):
        made.changed(part, "host", True, A)
        made.changed(part, "redis", True, A)
    made.changed(0, "host", True, B)  # not all of it
    assert remember(made, A) == []  # named again: B is the oldest now
    assert remember(made, C) == []
    assert [_text(each) for each in remember(made, B)] == ["-host 0 a", "-redis 0 a"]
    assert made.changed(0, "host", False, A) is None


def test_chunks_of_a_lost_agent_are_still_followed() -> None:
    made = holdings()
    made.changed(0, "host", True, A)
    assert [_text(each) for each in made.begin((0, 0))] == ["-host 0 a"]
    assert made.changed(0, "host", True, A) is None
    event = made.changed(1, "host", True, A)
    assert event is not None
    assert _text(event) == "+host 0 a"


def test_a_new_epoch_forgets_the_chunks() -> None:
    made = holdings()
    made.changed(0, "redis", True, B)
    assert [_text(each) for each in made.forget()] == ["-redis 0 b"]
    assert made.forget() == []
    assert made.changed(0, "redis", True, B) is None


def test_a_listener_ends_with_what_is_there() -> None:
    """Whatever is told: its events, added up, are the chunks of which every part is there."""
    rng = random.Random(3)
    groups, names = (0, 1, 0, 1), [bytes([n]) for n in range(6)]
    made = Holdings(4)
    events = made.begin(groups)
    parts: set[tuple[int, str, bytes]] = set()
    followed: list[bytes] = []  # the one that was named last at the end
    for _ in range(5000):
        name = rng.choice(names)
        if rng.random() < 0.05:
            events += remember(made, name)
            followed = [*(each for each in followed if each != name), name][-4:]
            parts = {each for each in parts if each[2] in followed}
        elif rng.random() < 0.002:
            events += made.begin(groups)
            parts.clear()
        elif name in followed:
            place = (rng.randrange(4), rng.choice(["host", "redis"]), name)
            there = rng.random() < 0.7
            (parts.add if there else parts.discard)(place)
            event = made.changed(place[0], place[1], there, name)
            events += [] if event is None else [event]
    told: set[tuple[str, int, Any]] = set()
    for stored, tier, group, chunk in events:
        # Never twice.
        assert ((tier, group, chunk) in told) is not stored
        (told.add if stored else told.remove)((tier, group, chunk))
    assert told == {
        (tier, group, name.decode())
        for tier in ("host", "redis")
        for group in (0, 1)
        for name in names
        if {(part, tier, name) for part in (group, group + 2)} <= parts
    }
