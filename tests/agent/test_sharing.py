# SPDX-License-Identifier: Apache-2.0
"""Which engines of an agent share, as STATUS says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.peers import Peer, Registration
from lmcache_redis.agent.sharing import sharing
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.device.layout import KVLayout, Segment

CHUNK_TOKENS = 64


def layout(**identity: str) -> KVLayout:
    return KVLayout(tuple(identity.items()), "bfloat16", "cpu", 16, 8, (Segment(0, 0, 64, 64),))


RANKS = [layout(rank=str(rank)) for rank in range(2)]


def worker(
    engine_id: str,
    *layouts: KVLayout,
    rank: int = 0,
    model: str = "model",
    ranks: int = 2,
    unnamed: bool = False,
    kv_rank: int = 0,
) -> Peer:
    """A registered one, with a layout for each group of layers."""
    forms: Any = tuple(
        SimpleNamespace(fingerprint=each.fingerprint(CHUNK_TOKENS), kv_rank=kv_rank)
        for each in layouts
    )
    device: Any = SimpleNamespace(layouts=layouts)
    peer = Peer(b"", m.Hello(1, engine_id, model, ranks, rank, "0", unnamed), 0.0)
    peer.registration = Registration(engine_id, rank, CHUNK_TOKENS, forms, device, ())
    return peer


def hexes(*layouts: KVLayout) -> list[str]:
    return [each.fingerprint(CHUNK_TOKENS).hex() for each in layouts]


def test_engines_of_equal_layouts_share_and_the_most_come_first() -> None:
    alone, other = layout(rank="0", revision="new"), layout(rank="0", revision="other")
    workers = [
        worker("old", other),
        worker("new", alone),
        worker("new too", alone),
        worker("another's", alone, model="another model"),
    ]
    apart, sole = [each["engines"] for each in sharing(workers)][1:]
    assert sharing(workers)[0] == {
        "model": "model", "layouts": hexes(alone), "engines": ["new", "new too"], "shares": 1,
        "apart": [],
    }  # fmt: skip
    assert (apart, sole) == (["old"], ["another's"])
    assert sharing([]) == []


def test_an_engine_has_the_layouts_of_all_ranks() -> None:
    """In their order, whichever has registered first."""
    workers = [worker("a", each, rank=rank) for rank, each in enumerate(RANKS)]
    (row,) = sharing(reversed(workers))
    assert (row["engines"], row["layouts"]) == (["a"], hexes(*RANKS))


def test_an_engine_in_part_here_shares_what_it_has_here() -> None:
    here = worker("in part", RANKS[1], rank=1)
    whole = [worker("whole", each, rank=rank) for rank, each in enumerate(RANKS)]
    (row,) = sharing([here, *whole])
    assert (row["engines"], row["layouts"]) == (["whole", "in part"], hexes(*RANKS))


def test_pairs_that_keep_engines_of_a_model_apart() -> None:
    first = [worker(each, layout(rank="0", revision="1", lora="x")) for each in "ab"]
    second = worker("c", layout(rank="0", revision="2", quantized="yes"))
    assert [each["apart"] for each in sharing([*first, second])] == [
        [],
        ["lora", "revision", "quantized"],
    ]
    # Each group of layers is compared with its own; those that are equal say nothing.
    groups = [layout(kind="full"), layout(kind="window", tokens="128")]
    others = [groups[0], layout(kind="window", tokens="256")]
    rows = sharing([worker("a", *groups), worker("b", *others)])
    assert [each["apart"] for each in rows] == [[], ["tokens"]]
    rows = sharing([worker("a", *groups), worker("b", layout(kind="state"))])
    assert [each["apart"] for each in rows] == [[], ["kind"]]


def test_what_cannot_be_printed_is_not_said() -> None:
    first, second = worker("a", layout(name="\x1b")), worker("b", layout(revision="2"))
    apart = sharing([first, second])[1]["apart"]
    assert apart[0] == "revision"
    assert "name" not in apart


@pytest.mark.parametrize("unnamed", [False, True])
def test_processes_of_an_unnamed_engine_are_one(unnamed: bool) -> None:
    workers = [worker("ab"[n], each, rank=n, unnamed=unnamed) for n, each in enumerate(RANKS)]
    found = [each["engines"] for each in sharing(workers)]
    assert found == ([["a"]] if unnamed else [["a"], ["b"]])
    alone = worker("c", RANKS[0], ranks=1, unnamed=True)
    (row,) = sharing([worker("a", RANKS[0], unnamed=True), alone])
    assert row["engines"] == ["a", "c"], "another size is another engine"


def test_shares_of_all_engines_count_once() -> None:
    def of(engine_id: str, first: int, held: int, rank: int, *groups: KVLayout) -> Peer:
        return worker(engine_id, *groups, rank=rank, kv_rank=share_rank(8, first, held))

    group = layout(kind="window")
    low, high = of("a", 0, 4, 0, RANKS[0]), of("a", 4, 4, 1, RANKS[0], group)
    whole = of("b", 0, 8, 0, RANKS[0], group)
    assert [each["shares"] for each in sharing([low])] == [4]
    (row,) = sharing([low, high, whole])
    assert (row["engines"], row["shares"]) == (["a", "b"], 8)
    # Of the first group, not of one that is cut otherwise.
    other = worker("b", group, rank=1, kv_rank=share_rank(2, 1))
    (row,) = sharing([worker("b", RANKS[0], kv_rank=share_rank(8, 0, 2)), other])
    assert row["shares"] == 2
    # Two that have half of the shares each have all together.
    (row,) = sharing([low, of("b", 4, 4, 0, RANKS[0])])
    assert row["shares"] == 8
