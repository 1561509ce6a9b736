"""Canaries: hits that an engine computes again, so that what is cached can be compared with it.

No rule says that a name covers everything that decides KV; looking does. A canary is computed from
its first token: what is computed behind a loaded prefix would inherit its faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# Of the prompt tokens that the engine computes, those of canaries.
SHARE = 0.02
# Beside them, so that a new engine begins: about the prompts of ten chats.
FIRST_TOKENS = 16_384


class Canaries:
    """Decides which hits of one engine are canaries.

    Each is one with the same probability, whatever came before, so that restarts make no
    difference. draw: a number from 0 to below 1.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._left_tokens = float(FIRST_TOKENS)

    def computed(self, prompt_tokens: int) -> None:
        """Adds tokens of prompts that the engine has computed, those of canaries included."""
        self._left_tokens += SHARE * prompt_tokens

    def takes(self, hit_tokens: int, every: int) -> bool:
        """Whether a hit that can be loaded is a canary; one in ``every`` is, 0: none."""
        if not every or self._left_tokens < hit_tokens or self._draw() * every >= 1:
            return False
        self._left_tokens -= hit_tokens
        return True
