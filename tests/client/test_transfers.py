"""Blocks are released exactly when the agent can no longer touch them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.client.link import CallState
from lmcache_redis.client.transfers import Retrieve, Store, TransferOp

OP = TransferOp([0], [b"hash"])
P, A, L = CallState.PENDING, CallState.ANSWERED, CallState.LOST


def lease(passed: bool) -> int:
    return time.monotonic_ns() + (-1 if passed else 10**12)


def played(state: CallState, sent: bool, ended: bool) -> tuple[Any, Any]:
    """A call, and the process of its agent."""
    return SimpleNamespace(state=state, sent=sent), SimpleNamespace(has_ended=lambda: ended)


@pytest.mark.parametrize(
    ("state", "sent", "lease_passed", "ended", "released"),
    [
        (A, True, True, True, True),
        (A, True, False, False, True),
        (P, True, False, False, False),
        (P, True, True, False, True),  # the agent discards what it reads now
        (L, True, False, False, False),  # lost, but a living agent may be reading
        (L, True, False, True, True),
        (L, False, False, False, True),  # never reached the agent
    ],
)
def test_blocks_of_a_store(
    state: CallState, sent: bool, lease_passed: bool, ended: bool, released: bool
) -> None:
    call, agent = played(state, sent, ended)
    assert Store(call, OP, lease(lease_passed), agent, None).over is released


@pytest.mark.parametrize("lease_passed", [False, True])
@pytest.mark.parametrize(
    ("state", "sent", "remapped", "ended", "released"),
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
    state: CallState, sent: bool, remapped: bool, ended: bool, released: bool, lease_passed: bool
) -> None:
    call, agent = played(state, sent, ended)
    retrieve = Retrieve(
        call, OP, lease(lease_passed), agent, None, skip_blocks=0, remapped=lambda: remapped
    )
    assert retrieve.over is released


def test_an_unknown_agent_is_not_known_to_have_ended() -> None:
    call, _ = played(L, True, False)
    assert not Store(call, OP, lease(False), None, None).over
