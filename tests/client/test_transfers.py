# SPDX-License-Identifier: Apache-2.0
"""Blocks are released exactly when the agent can no longer touch them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentCall
from lmcache_redis.client.registering import ExportedMemory, SentRegistration
from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.client.worker import RetrieveTransfer, StoreTransfer, TransferOp

OP = TransferOp([0], [b"hash"])
P, A, L = "pending", "answered", "lost"


def lease(passed: bool) -> int:
    return time.monotonic_ns() + (-1 if passed else 10**12)


def played(state: str, sent: bool, ended: bool) -> tuple[AgentCall, Any]:
    """A call, and the registration with its agent."""
    call = AgentCall(1, threading.Condition(), None, sent=sent)
    if state != P:
        call.end(m.Done(1) if state == A else None)
    return call, SimpleNamespace(agent_has_ended=lambda: ended)


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
    state: str, sent: bool, lease_passed: bool, ended: bool, released: bool
) -> None:
    call, agent = played(state, sent, ended)
    assert StoreTransfer(call, OP, lease(lease_passed), agent).over is released


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
    state: str, sent: bool, remapped: bool, ended: bool, released: bool, lease_passed: bool
) -> None:
    call, agent = played(state, sent, ended)
    retrieve = RetrieveTransfer(call, OP, lease(lease_passed), agent, lambda: remapped)
    assert retrieve.over is released


def test_an_unknown_agent_is_not_known_to_have_ended() -> None:
    call, _ = played(L, True, False)
    assert not StoreTransfer(call, OP, lease(False), None).over


def test_the_end_of_an_invisible_agent_is_never_known() -> None:
    """It may run in another PID namespace: its absence proves nothing."""
    welcome = m.Welcome(0, "agent", 2**22 + 1, 1, 64, 1.0, "0")
    gone = SentRegistration(ExportedMemory(), welcome, RankPlace("agent", ()), 64)
    assert not gone.agent_is_visible
    assert not gone.agent_has_ended()


# Of an answer that names what was not asked for, nothing is believed.
@pytest.mark.parametrize(
    "answer",
    [
        m.RetrieveResult(0, (1,)),
        m.RetrieveResult(0, (1, 3)),
        m.RetrieveResult(0, (-1,)),
        m.Failure(0, "FAILED", "?"),
        m.StoreResult(0, 3, 0, 0),
        None,
    ],
)
def test_failed_blocks_are_those_of_the_operation(answer: m.Answer | None) -> None:
    call, _ = played(P, True, False)
    call.end(answer)
    op = TransferOp([*range(10, 16)], [b"a", b"b", b"c"], 1)
    load = RetrieveTransfer(call, op, lease(False), None, lambda: False)
    is_good = answer == m.RetrieveResult(0, (1,))
    assert load.failed_blocks == ({12, 13} if is_good else set(range(11, 16)))
    assert [*load.failed_chunks] == ([1] if is_good else [0, 1, 2])


@pytest.mark.parametrize("of", [1, 2, 3])
def test_replicas_share_chunks_without_overlap(of: int) -> None:
    hashes = [bytes([7 * n % 256]) for n in range(20)]
    op = TransferOp([*range(40)], hashes, group=1)
    shares = [op.share(number, of) for number in range(of)]
    pairs = [
        (name, *share.block_ids[2 * n : 2 * n + 2])
        for share in shares
        for n, name in enumerate(share.hashes)
    ]
    assert sorted(pairs) == sorted((name, 2 * n, 2 * n + 1) for n, name in enumerate(hashes))
    assert {share.group for share in shares} == {1}
