# SPDX-License-Identifier: Apache-2.0
"""What routers are told, and what they then believe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from lmcache_redis.integrations.vllm.reports.holdings import AnnouncedChunk, Holdings
from tests.integrations.indexes import Indexes

A, B, C = b"a", b"b", b"c"
MANY = 1 << 20
Note = tuple[int, str, bool, bytes]


def remember(made: Holdings, name: bytes, blocks: Sequence[Any], number: int = 0) -> None:
    """Follows a chunk with these blocks in every group."""
    chunk: Any = AnnouncedChunk(number, [SimpleNamespace(block_hashes=list(blocks))] * 2)
    made.follow(name, lambda: chunk)


def told(made: Holdings, limit: int = MANY) -> list[str]:
    removed, stored = made.take(limit)
    gone = [f"-{tier} {group} {each}" for (tier, group), blocks in removed for each in blocks]
    new = []
    for (tier, group), chunk, first in stored:
        hashes: Any = chunk.parts[group].block_hashes
        new += [f"+{tier} {group} {each}" for each in hashes[first:]]
    return gone + new


def holdings(groups: tuple[int, ...] = (0,)) -> Holdings:
    made = Holdings(10)
    made.begin(groups)
    for name in (A, B):
        remember(made, name, [name.decode()])
    assert not made.has_news
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
    found = []
    for note in notes:
        made.changed(*note)
        found += told(made)
    assert found == events
    assert not made.has_news


def test_what_is_gone_before_it_was_told_is_not_told() -> None:
    made = holdings()
    made.changed(0, "host", True, A)
    made.changed(0, "host", True, B)
    assert told(made, 1) == ["+host 0 a"]
    made.changed(0, "host", False, B)
    assert not made.has_news
    assert told(made) == []


def chunk_of(rng: random.Random, branches: int) -> tuple[int, list[str]]:
    """A chunk of one of the prompts that part anywhere: its number, and its blocks' hashes."""
    number, blocks = rng.randrange(3), 4
    path = [rng.randrange(branches) if rng.random() < 0.2 else 0 for _ in range(blocks * 3)]
    hashes = ["".join(map(str, path[: end + 1])) for end in range(len(path))]
    return number, hashes[number * blocks : (number + 1) * blocks]


def played(seed: int) -> int:
    """A random history; what all kinds of indexes have in its course and at its end.

    Returns how many blocks they had at the end.
    """
    rng = random.Random(seed)
    groups = rng.choice([(0,), (0, 0), (0, 1), (0, 1, 0, 1)])
    limit, per_step = rng.choice([4, 12, 40]), rng.choice([1, 3, 100])
    names: dict[bytes, tuple[int, list[str]]] = {}
    for _ in range(rng.choice([6, 30])):
        number, blocks = chunk_of(rng, 3)
        names[blocks[-1].encode()] = (number, blocks)
    made, indexes = Holdings(limit), Indexes()
    made.begin(groups)
    epoch = b""
    followed: dict[tuple[bytes, bytes], None] = {}  # of an epoch, the one that was named last last
    parts: set[tuple[int, str, tuple[bytes, bytes]]] = set()
    resets = 0

    def step(limit: int) -> None:
        nonlocal resets
        indexes.take([AllBlocksCleared()] * resets)  # vLLM's events come first
        resets = 0
        removed, stored = made.take(limit)
        assert len(stored) <= limit
        for (tier, group), gone in removed:
            indexes.take([BlockRemoved(block_hashes=gone, medium=tier, group_idx=group)])
        for (tier, group), chunk, first in stored:
            new: Any = chunk.parts[group].block_hashes[first:]
            assert new
            indexes.take([
                BlockStored(
                    block_hashes=list(new), parent_block_hash=None, token_ids=[], block_size=1,
                    lora_id=None, medium=tier, lora_name=None, group_idx=group,
                )
            ])  # fmt: skip
        indexes.there()

    def truth() -> dict[Any, set[str]]:
        there: dict[Any, set[str]] = {}
        for tier in ("host", "redis"):
            for group in {*groups}:
                mine = [part for part, of in enumerate(groups) if of == group]
                for name in followed:
                    if name[0] == epoch and {(part, tier, name) for part in mine} <= parts:
                        blocks = names[name[1]][1]
                        there.setdefault((tier, None, group), set()).update(blocks)
        return there

    for _ in range(rng.choice([20, 100, 300])):
        dice = rng.random()
        name = (epoch, rng.choice([*names]))
        if dice < 0.25:
            number, blocks = names[name[1]]
            remember(made, b"".join(name), blocks, number)
            followed.pop(name, None)
            followed[name] = None
            for each in [*followed][:-limit]:
                del followed[each]
            parts = {each for each in parts if each[2] in followed}
        elif dice < 0.75:
            changed = rng.choice([*followed, name])
            part, tier, there = rng.randrange(4), rng.choice(["host", "redis"]), rng.random() < 0.7
            made.changed(part, tier, there, b"".join(changed))
            if changed in followed and part < len(groups):
                (parts.add if there else parts.discard)((part, tier, changed))
        elif dice < 0.95:
            step(per_step)
        elif dice < 0.98:
            resets += 1
            made.tell_again()
        elif dice < 0.99:
            epoch = rng.choice([b"", b"second", b"third"])
            made.begin_epoch(epoch)
        elif dice < 0.995:
            made.begin(groups)
            parts.clear()
        else:
            made.forget()
            followed.clear()
            parts.clear()
    step(per_step)
    while made.has_news:
        step(per_step)
    assert indexes.there() == truth()
    return sum(map(len, indexes.there().values()))


def test_every_kind_of_router_ends_with_what_is_there() -> None:
    assert sum(map(played, range(400))) > 2000


if __name__ == "__main__":
    import sys

    print(sum(map(played, range(int(sys.argv[1])))), "blocks at the ends")
