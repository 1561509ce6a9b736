# SPDX-License-Identifier: Apache-2.0
"""What prefixes need, against a reference that looks at every token and every prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.chunks.names import Reach

ALL, STATE = Reach(), Reach("state")


def reads(reach: Reach, token: int, end: int) -> bool:
    """Whether the layers still read this token after a prefix of `end` tokens."""
    if reach.kind == "window":
        return end - token < reach.tokens  # the window holds the next token, number `end`, too
    if reach.kind == "local":
        return token // reach.tokens == end // reach.tokens
    return reach.kind == "all" or token == end - 1


def needed(reaches: list[Reach], length: int, first_chunk: int, chunk_tokens: int) -> set[Part]:
    end = (first_chunk + length) * chunk_tokens
    return {
        (chunk, row)
        for row, reach in enumerate(reaches)
        for chunk in range(length)
        if any(
            reads(reach, (first_chunk + chunk) * chunk_tokens + token, end)
            for token in range(chunk_tokens)
        )
    }


reaches = st.one_of(
    st.just(ALL),
    st.just(STATE),
    st.builds(Reach, st.just("window"), st.integers(1, 40)),
    st.builds(Reach, st.just("local"), st.integers(1, 40) | st.sampled_from([4, 8, 16, 32])),
)


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[Reach], int, int, int, set[Part]]:
    """Rows, the first chunk, tokens of a chunk, the chunks asked for, and the parts that exist."""
    rows = draw(st.lists(reaches, min_size=1, max_size=4))
    limit = draw(st.integers(0, 8))
    every = [(chunk, row) for chunk in range(limit) for row in range(len(rows))]
    # As often few gaps as many.
    gaps = draw(st.sets(st.sampled_from(every), max_size=draw(st.integers(0, 30)))) if every else ()
    first_chunk, chunk_tokens = draw(st.integers(0, 5)), draw(st.sampled_from([1, 3, 4, 8]))
    return rows, first_chunk, chunk_tokens, limit, {*every} - {*gaps}


@given(lookups())
def test_it_is_what_a_plain_search_finds(
    lookup: tuple[list[Reach], int, int, int, set[Part]],
) -> None:
    rows, first_chunk, chunk_tokens, limit, there = lookup
    needs = PrefixNeeds(rows, first_chunk, chunk_tokens)
    of_each = [needed(rows, length, first_chunk, chunk_tokens) for length in range(limit + 1)]
    for length in range(limit + 1):
        assert sorted(needs.parts(length)) == sorted(of_each[length])
    of_any = {part for parts in of_each for part in parts if rows[part[1]] != ALL}
    assert sorted(needs.parts_of_any(limit)) == sorted(of_any)
    asked: list[Part] = []

    def has(part: Part) -> bool:
        asked.append(part)
        return part in there

    longest = max(length for length in range(limit + 1) if of_each[length] <= there)
    assert needs.longest(limit, has) == longest
    assert len(asked) == len(set(asked)), "each part is asked about once"
    assert set(asked) <= of_any | {part for parts in of_each for part in parts}


def test_rows_that_need_all_end_at_their_first_gap() -> None:
    """They need no size of a chunk."""
    needs, gaps = PrefixNeeds([ALL, ALL], 0, 0), {(700, 1), (500, 0), (900, 0)}
    assert needs.longest(1000, lambda part: True) == 1000
    assert needs.longest(1000, lambda part: part not in gaps) == 500


@pytest.mark.parametrize(("first_chunk", "chunk_tokens"), [(0, 0), (-1, 256), (0, -1)])
def test_windows_cannot_be_told_without_the_size_of_a_chunk(
    first_chunk: int, chunk_tokens: int
) -> None:
    with pytest.raises(ValueError, match="first chunk"):
        PrefixNeeds([ALL, STATE], first_chunk, chunk_tokens)
