"""When the engine may reuse the blocks of a transfer: pure decisions.

A store reads. The agent discards what it reads after the lease. So the blocks are free when the
agent has answered, when the lease has expired, or when its process has ended.

A retrieve writes, and a write cannot be recalled. Its blocks are free when the agent has answered,
when its process has ended, or when it has closed the mapping that the retrieve writes through. The
agent reports that by mapping the engine's memory again (`RegisterKVCache`), which it does only
after the copies through the old mapping have ended. While an agent is frozen, its blocks stay held.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcache_redis.client.calls import CallState

STORE_LEASE_S = 1.5
# A store from a GPU waits for the queued work of that GPU: the step that computes the blocks.
STEP_S = 5.0
RETRIEVE_LEASE_S = 5.0


def store_released(
    call: CallState, *, sent: bool, now_ns: int, lease_ns: int, agent_ended: Callable[[], bool]
) -> bool:
    """Whether the agent no longer needs the blocks of a store.

    sent: whether the agent may have received the call.
    """
    if call is CallState.ANSWERED or now_ns > lease_ns:
        return True
    return call is CallState.LOST and (not sent or agent_ended())


def retrieve_released(
    call: CallState, *, sent: bool, remapped: bool, agent_ended: Callable[[], bool]
) -> bool:
    """Whether the agent can no longer write to the blocks of a retrieve.

    remapped: whether the agent has mapped the engine's memory again since the call.
    """
    if call is not CallState.LOST:
        return call is CallState.ANSWERED
    return not sent or remapped or agent_ended()
