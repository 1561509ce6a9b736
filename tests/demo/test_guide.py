# SPDX-License-Identifier: Apache-2.0
"""The demo's texts and questions."""

from __future__ import annotations

import re

from demo.guide import make_guides, question_of


def words_of(text: str) -> int:
    return len(text.split())


def test_guides_are_as_long_as_asked_and_all_different() -> None:
    guides = make_guides(20, 500, words_of)
    assert all(500 <= words_of(guide) < 600 for guide in guides)
    assert len({guide[:200] for guide in guides}) == 20, "no chunk is shared"
    assert guides == make_guides(20, 500, words_of)


def test_the_text_has_what_is_asked_for() -> None:
    for guide in make_guides(8, 500, words_of):
        text, _, last = guide.rpartition("\n")
        assert question_of(guide) == last
        asked = re.fullmatch(r"In (\w+): .* number (\d+).*\?", last)
        assert asked is not None
        assert text.startswith(f"A guide to the town of {asked[1]}.\n")
        assert f"\nThe shop at number {asked[2]} " in text
