"""Who may touch the blocks of a transfer, decided apart from the I/O around it.

Blocks of a store belong to the agent, for reading, until it answers or the lease has run
out: what it reads later it throws away. Blocks of a retrieve belong to the agent, for
writing, until it answers, or its process is gone, or the lease has run out and the process
is seen running: a running agent starts no copy after the lease, and ends the one it is
in within ``LAST_COPY_S``. A stopped process may be inside a copy, so its blocks wait for it.
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
LAST_COPY_S = 0.5


class Blocks(Enum):
    """What became of the blocks of a transfer."""

    HELD = "held"  # the agent may still touch them
    ANSWERED = "answered"  # the agent has said what it did
    ABANDONED = "abandoned"  # nobody answered, and nobody will touch them any more


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
    call: CallState, *, sent: bool, now_ns: int, lease_ns: int, agent: Callable[[], ProcessState]
) -> Blocks:
    """What became of the blocks of a retrieve."""
    if call is CallState.ANSWERED:
        return Blocks.ANSWERED
    late = now_ns > lease_ns + int(LAST_COPY_S * 1e9)
    if call is CallState.PENDING and not late:
        return Blocks.HELD
    if not sent:
        return Blocks.ABANDONED
    state = agent()
    over = state is ProcessState.GONE or (late and state is not ProcessState.STOPPED)
    return Blocks.ABANDONED if over else Blocks.HELD
