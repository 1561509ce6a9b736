"""Blocks are released exactly when the agent can no longer touch them."""

from __future__ import annotations

import pytest

from lmcache_redis.client.calls import CallState
from lmcache_redis.client.ownership import retrieve_released, store_released

LEASE_NS = 1_000_000_000
WITHIN, AFTER = LEASE_NS - 1, LEASE_NS + 1
P, A, L = CallState.PENDING, CallState.ANSWERED, CallState.LOST


@pytest.mark.parametrize(
    ("call", "sent", "now_ns", "ended", "released"),
    [
        (A, True, AFTER, True, True),
        (A, True, WITHIN, False, True),
        (P, True, WITHIN, False, False),
        (P, True, AFTER, False, True),  # the agent discards what it reads now
        (L, True, WITHIN, False, False),  # lost, but a living agent may be reading
        (L, True, WITHIN, True, True),
        (L, False, WITHIN, False, True),  # never reached the agent
    ],
)
def test_blocks_of_a_store(
    call: CallState, sent: bool, now_ns: int, ended: bool, released: bool
) -> None:
    found = store_released(
        call, sent=sent, now_ns=now_ns, lease_ns=LEASE_NS, agent_ended=lambda: ended
    )
    assert found is released


@pytest.mark.parametrize(
    ("call", "sent", "remapped", "ended", "released"),
    [
        (A, True, False, True, True),
        (A, True, False, False, True),
        (P, True, False, False, False),  # however long it takes
        (P, True, False, True, False),  # the link reports the loss first
        (P, True, True, False, False),  # the call goes through the current mapping
        (L, True, False, False, False),  # the agent may resume inside a copy
        (L, True, False, True, True),
        (L, True, True, False, True),  # the agent has closed the mapping it would write through
        (L, False, False, False, True),  # never reached the agent
    ],
)
def test_blocks_of_a_retrieve(
    call: CallState, sent: bool, remapped: bool, ended: bool, released: bool
) -> None:
    found = retrieve_released(call, sent=sent, remapped=remapped, agent_ended=lambda: ended)
    assert found is released
