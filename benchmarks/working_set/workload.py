# SPDX-License-Identifier: Apache-2.0
"""The prompts of a scenario, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demo.model import make_prompts

DOCUMENTS, CONVERSATIONS = SCENARIOS = ("documents", "conversations")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes in tokens. grows: each question and its answer become part of the text."""

    name: str
    texts: int
    text_tokens: int
    question_tokens: int
    answer_tokens: int
    grows: bool
    rounds: int

    @property
    def kept_tokens(self) -> int:
        """The longest text that is worth keeping, after the last round."""
        if not self.grows:
            return self.text_tokens
        # The first round is not one of ``rounds``.
        return self.text_tokens + (self.rounds + 1) * (self.question_tokens + self.answer_tokens)

    @property
    def most_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self.kept_tokens + self.question_tokens + self.answer_tokens


def scenario_of(name: str, texts: int, text_tokens: int, rounds: int) -> Scenario:
    """The sizes of a scenario. A conversation begins with half of a document."""
    if name == DOCUMENTS:
        return Scenario(name, texts, text_tokens, 33, 1, False, rounds)
    return Scenario(name, texts, text_tokens // 2, 112, 16, True, rounds)


class Prompts:
    """The same prompts in every run, as long as the answers are the same."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.warm_up, *self.texts = make_prompts(scenario.texts + 1, scenario.text_tokens)
        count = scenario.texts * (scenario.rounds + 1)
        self._questions = iter(make_prompts(count, scenario.question_tokens))

    def next(self) -> list[list[int]]:
        """Every text with a question that was not asked before."""
        return [text + next(self._questions) for text in self.texts]

    def answered(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Lets conversations grow."""
        if self._scenario.grows:
            self.texts = [p + answer for p, answer in zip(prompts, answers, strict=True)]
