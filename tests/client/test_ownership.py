"""Blocks are free exactly when the agent can no longer touch them."""

from __future__ import annotations

import pytest

from lmcache_redis.client.link import CallState
from lmcache_redis.client.liveness import ProcessState
from lmcache_redis.client.ownership import Blocks, retrieve_blocks, store_blocks

LEASE_NS = 1_000_000_000
WITHIN, AFTER = LEASE_NS - 1, LEASE_NS + 1
P, A, L = CallState.PENDING, CallState.ANSWERED, CallState.LOST
RUNNING, STOPPED, GONE, UNKNOWN = (
    ProcessState.RUNNING,
    ProcessState.STOPPED,
    ProcessState.GONE,
    ProcessState.UNKNOWN,
)


@pytest.mark.parametrize(
    ("call", "sent", "now_ns", "agent", "expected"),
    [
        (A, True, AFTER, GONE, Blocks.ANSWERED),
        (P, True, WITHIN, RUNNING, Blocks.HELD),
        (P, True, AFTER, RUNNING, Blocks.ABANDONED),  # what it reads now it throws away
        (P, True, AFTER, STOPPED, Blocks.ABANDONED),
        (L, True, WITHIN, RUNNING, Blocks.HELD),  # lost, but a living agent may be reading
        (L, True, WITHIN, STOPPED, Blocks.HELD),
        (L, True, WITHIN, UNKNOWN, Blocks.HELD),
        (L, True, WITHIN, GONE, Blocks.ABANDONED),
        (L, False, WITHIN, RUNNING, Blocks.ABANDONED),  # never reached it
    ],
)
def test_blocks_of_a_store(
    call: CallState, sent: bool, now_ns: int, agent: ProcessState, expected: Blocks
) -> None:
    found = store_blocks(call, sent=sent, now_ns=now_ns, lease_ns=LEASE_NS, agent=lambda: agent)
    assert found is expected


@pytest.mark.parametrize(
    ("call", "sent", "remapped", "agent", "expected"),
    [
        (A, True, False, GONE, Blocks.ANSWERED),
        (P, True, False, RUNNING, Blocks.HELD),  # however long it takes
        (P, True, False, STOPPED, Blocks.HELD),
        (P, True, True, RUNNING, Blocks.HELD),  # it is asked through the mapping there is now
        (L, True, False, RUNNING, Blocks.HELD),  # it may have woken up inside a copy
        (L, True, False, STOPPED, Blocks.HELD),
        (L, True, False, UNKNOWN, Blocks.HELD),
        (L, True, False, GONE, Blocks.ABANDONED),
        (L, True, True, RUNNING, Blocks.ABANDONED),  # the mapping it would write through is closed
        (L, False, False, RUNNING, Blocks.ABANDONED),  # never reached it
    ],
)
def test_blocks_of_a_retrieve(
    call: CallState, sent: bool, remapped: bool, agent: ProcessState, expected: Blocks
) -> None:
    found = retrieve_blocks(call, sent=sent, remapped=remapped, agent=lambda: agent)
    assert found is expected
