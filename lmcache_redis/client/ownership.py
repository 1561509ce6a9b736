"""When the blocks of a transfer are the engine's again, decided apart from the I/O around it.

A store reads. What the agent reads past the lease it throws away, so the blocks are free when it
has answered, when the lease has run out, or when its process is gone.

A retrieve writes, and nothing can call a write back. Its blocks are free when the agent has
answered, when its process is gone, or when it has closed the mapping that the retrieve would be
written through: it says so by mapping the engine's memory again (`RegisterKVCache`), which it does
only after the copies through the old mapping have ended. A frozen agent keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from lmcache_redis.client.link import CallState
from lmcache_redis.client.liveness import ProcessState

STORE_LEASE_S = 1.5
# A store from a GPU waits for what is queued there: the step that computes the blocks.
STEP_S = 5.0
RETRIEVE_LEASE_S = 5.0


class Blocks(Enum):
    """What became of the blocks of a transfer."""

    HELD = "held"  # the agent may still touch them
    ANSWERED = "answered"  # the agent has said what it did
    ABANDONED = "abandoned"  # no answer will come, and the agent will not touch them any more


def store_blocks(
    call: CallState, *, sent: bool, now_ns: int, lease_ns: int, agent: Callable[[], ProcessState]
) -> Blocks:
    """What became of the blocks of a store."""
    if call is CallState.ANSWERED:
        return Blocks.ANSWERED
    if now_ns > lease_ns:
        return Blocks.ABANDONED
    unreachable = call is CallState.LOST and (not sent or agent() is ProcessState.GONE)
    return Blocks.ABANDONED if unreachable else Blocks.HELD


def retrieve_blocks(
    call: CallState, *, sent: bool, remapped: bool, agent: Callable[[], ProcessState]
) -> Blocks:
    """What became of the blocks of a retrieve.

    remapped: the agent has mapped the engine's memory again since.
    """
    if call is CallState.ANSWERED:
        return Blocks.ANSWERED
    if call is CallState.PENDING:
        return Blocks.HELD
    over = not sent or remapped or agent() is ProcessState.GONE
    return Blocks.ABANDONED if over else Blocks.HELD
