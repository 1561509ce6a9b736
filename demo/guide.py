# SPDX-License-Identifier: Apache-2.0
"""The demo's long texts: guides to towns that do not exist, and a question about each.

Generated, so that they are free, as long as one likes, and the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_TOWNS = ("Elmford", "Ashby", "Norwick", "Daleham", "Brookton", "Fernley", "Hartwell", "Linden")
_NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Mary")
_FAMILIES = (
    "Baker",
    "Carter",
    "Dale",
    "Ellis",
    "Fisher",
    "Green",
    "Hill",
    "Lane",
    "Moore",
    "Price",
)
_GOODS = ("bread", "books", "shoes", "clocks", "cheese", "hats", "tea", "lamps", "violins", "soap")
_STREETS = ("Mill", "Harbour", "Church", "Garden", "River", "Station", "Bridge", "Castle", "Forest")
_COLOURS = ("red", "blue", "green", "white", "yellow", "black")
_PETS = ("dog", "cat", "parrot", "goat", "donkey")
_QUESTIONS = (
    "Who owns the shop at number {}?",
    "What does the shop at number {} sell?",
    "When was the shop at number {} founded?",
)


def make_guides(count: int, tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """``count`` prompts, each a guide of about ``tokens`` tokens and a question about it."""
    return [_prompt(number, tokens, count_tokens) for number in range(count)]


def question_of(prompt: str) -> str:
    """The last line."""
    return prompt.rpartition("\n")[2]


def _prompt(number: int, tokens: int, count_tokens: Callable[[str], int]) -> str:
    rng = random.Random(number)
    town = _TOWNS[number % len(_TOWNS)]
    paragraphs = [f"A guide to the town of {town}."]
    length = 0
    while length < tokens:
        paragraphs.append(_shop(len(paragraphs), rng))
        length += count_tokens(paragraphs[-1])
    asked = rng.randrange(1, len(paragraphs))
    paragraphs.append(f"In {town}: {_QUESTIONS[number % len(_QUESTIONS)].format(asked)}")
    return "\n".join(paragraphs)


def _shop(number: int, rng: random.Random) -> str:
    return (
        f"The shop at number {number} {rng.choice(_STREETS)} Street belongs to "
        f"{rng.choice(_NAMES)} {rng.choice(_FAMILIES)}. "
        f"It sells {' and '.join(rng.sample(_GOODS, 2))}. "
        f"It was founded in {rng.randrange(1700, 1990)} and opens at {rng.randrange(6, 11)}. "
        f"Its sign is painted {rng.choice(_COLOURS)}, and its owner has a {rng.choice(_PETS)} "
        f"whose name is {rng.choice(_NAMES)}."
    )
