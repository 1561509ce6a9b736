"""From which tier the tokens of a hit come."""

from __future__ import annotations

from collections.abc import Sequence


def tokens_by_tier(
    tokens: range, tiers: Sequence[str], *, first_chunk: int, chunk_tokens: int
) -> dict[str, int]:
    """How many of a prompt's ``tokens`` come from each tier, without those that have none.

    tiers: of the chunks from ``first_chunk`` on. Tokens of other chunks do not count.
    """
    found: dict[str, int] = {}
    begin = tokens.start
    while begin < tokens.stop:
        chunk = begin // chunk_tokens
        end = min((chunk + 1) * chunk_tokens, tokens.stop)
        index = chunk - first_chunk
        if 0 <= index < len(tiers):
            found[tiers[index]] = found.get(tiers[index], 0) + end - begin
        begin = end
    return found
