# SPDX-License-Identifier: Apache-2.0
"""What one scheduler has not been told yet."""

from __future__ import annotations

import pytest

from lmcache_redis.agent.reports.watching import Journal
from lmcache_redis.chunks.names import ChunkNames, PartNames
from lmcache_redis.messages import Change

PARTS = [PartNames(ChunkNames(bytes([n]) * 32, b"lmcache"), "model", n) for n in range(2)]
OTHER = PartNames(ChunkNames(b"o" * 32, b"lmcache"), "model", 0)
A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def journal(*notes: tuple[int, bytes, str, bool], limit: int = 100) -> Journal:
    noted = Journal(PARTS, limit)
    for part, chunk_hash, tier, there in notes:
        noted.note(PARTS[part].key(chunk_hash), tier, there)
    return noted


@pytest.mark.parametrize(
    ("notes", "changes"),
    [
        ([], ()),
        ([(0, A, "h", True)], (Change(0, "h", True, (A,)),)),
        # Of one part, tier and kind: one entry.
        ([(1, A, "h", True), (1, B, "h", True)], (Change(1, "h", True, (A, B)),)),
        (
            [(0, A, "h", True), (1, A, "h", True), (0, B, "h", True)],
            (Change(0, "h", True, (A,)), Change(1, "h", True, (A,)), Change(0, "h", True, (B,))),
        ),
        ([(0, A, "h", True), (0, A, "r", True)], tuple(Change(0, t, True, (A,)) for t in "hr")),
        # The last change counts, at its place in the order.
        (
            [(0, A, "h", True), (0, B, "h", True), (0, A, "h", False)],
            (Change(0, "h", True, (B,)), Change(0, "h", False, (A,))),
        ),
        ([(0, A, "h", True), (0, A, "h", False), (0, A, "h", True)], (Change(0, "h", True, (A,)),)),
    ],
)
def test_changes(notes: list[tuple[int, bytes, str, bool]], changes: tuple[Change, ...]) -> None:
    noted = journal(*notes)
    assert noted.take(100) == (changes, False)
    assert noted.take(100) == ((), False)
    assert len(noted) == 0


@pytest.mark.parametrize("before", [0, 8, 16, 24])
def test_names_with_an_epoch_and_an_adapter(before: int) -> None:
    name = b"p" * before + A
    noted = journal((1, name, "h", True))
    assert noted.take(100) == ((Change(1, "h", True, (name,)),), False)


def test_chunks_of_others_are_ignored() -> None:
    noted = journal()
    noted.note(OTHER.key(A), "h", True)
    noted.note(b"", "h", True)
    noted.note(A, "h", True)
    assert len(noted) == 0


def test_the_oldest_are_taken_first() -> None:
    noted = journal(*((0, each, "h", True) for each in (A, B, C)))
    assert noted.take(2) == ((Change(0, "h", True, (A, B)),), False)
    assert noted.take(2) == ((Change(0, "h", True, (C,)),), False)


def test_too_many_are_dropped_and_that_is_told_once() -> None:
    noted = journal(*((0, each, "h", True) for each in (A, B, C)), limit=2)
    assert len(noted) == 1
    noted.note(PARTS[0].key(A), "r", True)
    assert noted.take(100) == ((Change(0, "r", True, (A,)),), True)
    assert noted.take(100) == ((), False)
