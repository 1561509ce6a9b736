# SPDX-License-Identifier: Apache-2.0
"""What prefixes need, against a reference that looks at every token and every prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.cache.pacing import Part, PrefixNeeds
from lmcache_redis.chunks.names import Reach

ALL, STATE = Reach(), Reach("state")
CHUNK = 256


def window(tokens: int) -> Reach:
    return Reach("window", tokens)


def local(tokens: int) -> Reach:
    return Reach("local", tokens)


# ------------------------------------------------------------------ reference


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
    st.integers(1, 40).map(window),
    st.integers(1, 40).map(local),
    st.sampled_from([4, 8, 16, 32]).map(local),
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


# ---------------------------------------------------------------- made by hand


def longest(
    rows: list[Reach], limit: int, *gaps: Part, first_chunk: int = 0, there: set[Part] | None = None
) -> int:
    needs = PrefixNeeds(rows, first_chunk, CHUNK)
    return needs.longest(limit, lambda p: p in there if there is not None else p not in gaps)


def test_rows_that_need_all_end_at_their_first_gap() -> None:
    assert longest([ALL, ALL], 1000) == 1000
    assert longest([ALL, ALL], 1000, (700, 1), (500, 0), (900, 0)) == 500
    assert PrefixNeeds([ALL, ALL], 0, 0).longest(9, lambda part: part != (4, 1)) == 4


def test_a_longer_window_needs_a_part_more() -> None:
    needs = PrefixNeeds([window(512), window(514)], 0, CHUNK)
    assert [chunk for chunk, row in needs.parts(16) if row == 0] == [14, 15]
    assert [chunk for chunk, row in needs.parts(16) if row == 1] == [13, 14, 15]
    assert [*PrefixNeeds([window(1)], 0, CHUNK).parts(16)] == [], "it reads the next token alone"


def test_a_window_shorter_than_a_chunk_needs_the_last_part_only() -> None:
    assert [*PrefixNeeds([window(128)], 0, CHUNK).parts(16)] == [(15, 0)]
    assert longest([window(128)], 16, *[(chunk, 0) for chunk in range(15)]) == 16


def test_a_gap_before_the_window_does_no_harm_and_one_in_it_does() -> None:
    assert longest([ALL, window(512)], 16, (13, 1)) == 16
    assert longest([ALL, window(512)], 16, (14, 1)) == 14
    assert longest([ALL, window(512)], 16, (14, 1), (13, 1), (12, 1)) == 12


def test_a_window_kept_where_an_earlier_prompt_ended() -> None:
    """16 chunks of the other row; parts of the window for a prefix of 9 alone."""
    there = {(chunk, 0) for chunk in range(16)} | {(7, 1), (8, 1)}
    assert longest([ALL, window(512)], 16, there=there) == 9


def test_one_row_without_any_part_leaves_the_empty_prefix() -> None:
    there = {(chunk, 0) for chunk in range(16)}
    assert longest([ALL, STATE], 16, there=there) == 0


def test_local_attention_needs_nothing_at_a_border() -> None:
    there = {(chunk, 0) for chunk in range(16)}
    # 2,048 tokens are 8 chunks: a prefix of 8 reads none of them, one of 9 reads the last.
    assert longest([ALL, local(2048)], 15, there=there) == 8
    assert longest([ALL, local(2048)], 15, there=there | {(8, 1), (9, 1)}) == 10
    assert [*PrefixNeeds([local(384)], 0, CHUNK).parts(2)] == [(1, 0)]
    assert [*PrefixNeeds([local(384)], 0, CHUNK).parts(3)] == []


def test_states_decide_at_which_chunks_a_prefix_can_end() -> None:
    there = {(chunk, 0) for chunk in range(16)} | {(3, 1), (11, 1), (7, 2), (3, 2)}
    assert longest([ALL, STATE], 16, there=there) == 12
    assert longest([ALL, STATE, STATE], 16, there=there) == 4


def test_what_the_engine_has_counts_for_the_position() -> None:
    needs = PrefixNeeds([ALL, window(1024), local(2048)], 6, CHUNK)
    assert [*needs.parts(1)] == [(0, 0), (0, 1), (0, 2)]
    # Chunk 2 of the lookup is chunk 8 of the prompt, where local attention begins anew.
    assert [*needs.parts(3)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (2, 2)]
    assert longest([window(1024)], 3, (0, 0), first_chunk=6) == 0


@pytest.mark.parametrize(("first_chunk", "chunk_tokens"), [(0, 0), (-1, 256), (0, -1)])
def test_windows_cannot_be_told_without_the_size_of_a_chunk(
    first_chunk: int, chunk_tokens: int
) -> None:
    with pytest.raises(ValueError, match="first chunk"):
        PrefixNeeds([ALL, STATE], first_chunk, chunk_tokens)
