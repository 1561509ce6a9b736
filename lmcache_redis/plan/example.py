# SPDX-License-Identifier: Apache-2.0
"""A made trace whose locality is known, in Mooncake's form.

Conversations begin all the time. Each has one of a few system prompts (the k-th is chosen in
proportion to 1/k), which is followed by a document of its own, and comes back for a few more turns,
after pauses that are exponentially distributed. Each turn repeats the prompt so far and adds to it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterator

MOONCAKE_BLOCK_TOKENS = 512
_SYSTEM_PROMPTS = 12
_SYSTEM_BLOCKS = 4
_DOCUMENT_BLOCKS = (2, 24)
_TURN_BLOCKS = (1, 3)
_MOST_TURNS = 8
_PAUSE_S = 90.0
_NEW_EVERY_S = 8.0


def example_lines(requests: int, seed: int = 1) -> Iterator[str]:
    """So many lines of JSON, the same for one seed."""
    made, numbers = random.Random(seed), itertools.count(_SYSTEM_PROMPTS * _SYSTEM_BLOCKS)
    weights = [1 / rank for rank in range(1, _SYSTEM_PROMPTS + 1)]
    order = itertools.count()
    # When the turn comes, the blocks before it, and how many turns follow.
    due: list[tuple[float, int, list[int], int]] = []
    starts_s = 0.0
    for _ in range(requests):
        if not due or starts_s < due[0][0]:
            now_s, starts_s = starts_s, starts_s + made.expovariate(1 / _NEW_EVERY_S)
            (system,) = made.choices(range(_SYSTEM_PROMPTS), weights)
            blocks = [system * _SYSTEM_BLOCKS + n for n in range(_SYSTEM_BLOCKS)]
            blocks += itertools.islice(numbers, made.randint(*_DOCUMENT_BLOCKS))
            turns = made.randint(0, _MOST_TURNS)
        else:
            now_s, _, blocks, turns = heapq.heappop(due)
        asks = made.randint(*_TURN_BLOCKS)
        blocks = [*blocks, *itertools.islice(numbers, asks)]
        spare = made.randrange(MOONCAKE_BLOCK_TOKENS)
        length = len(blocks) * MOONCAKE_BLOCK_TOKENS - spare
        if turns:
            pause_s = made.expovariate(1 / _PAUSE_S)
            # The last block was not full: the next turn fills it otherwise.
            kept = blocks[:-1] if spare else blocks
            heapq.heappush(due, (now_s + pause_s, next(order), kept, turns - 1))
        yield json.dumps(
            {
                "timestamp": round(now_s * 1000),
                "input_length": length,
                "output_length": made.randint(16, 512),
                "hash_ids": blocks,
            }
        )
