# SPDX-License-Identifier: Apache-2.0
"""A worker's messages to an agent's socket, and what it makes of each answer, or of none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.client import worker as worker_module
from lmcache_redis.client.registering import CacheGroup, SentRegistration
from lmcache_redis.client.worker import NEVER, TransferOp, WorkerClient
from lmcache_redis.processes import process_start_time
from tests.client.stand_in import WAIT_S, Agent
from tests.harness import wait_until

HERE = os.getpid(), process_start_time(os.getpid()) or 0
NOWHERE = 2**22 + 1, 1  # no process may have this id
A, B, C, D = (bytes([n]) * 32 for n in range(4))
BLOCKS = 24


class Node:
    """A worker, and the socket of its agent. told: the registrations that it was told of."""

    def __init__(self, directory: Path) -> None:
        self.agent = Agent(directory)
        self.told: list[SentRegistration] = []
        self.worker = WorkerClient(
            self.agent.endpoint, "model", 2, 1, 16,
            engine_id="engine", agent_dead_after_s=WAIT_S, on_registered=self.told.append,
        )  # fmt: skip

    def welcome(self, agent_id: str = "agent", process: tuple[int, int] = HERE) -> None:
        hello = self.agent.welcome(self.worker.link, agent_id, process)
        assert (hello.worker_id, hello.world_size) == (1, 2)

    def register(self) -> None:
        """Two groups, of blocks of 16 and of 32 tokens. Of the second another has equal bytes."""
        first = {"a": torch.zeros(BLOCKS, 16, 8), "b": torch.zeros(BLOCKS, 16, 8)}
        second = {"c": torch.zeros(BLOCKS, 32, 4)}
        self.worker.register_groups(
            [
                CacheGroup(first, "float32", 16),
                CacheGroup(second, "float32", 32, shard=(0, 1), replica=(1, 2)),
            ],
            num_blocks=BLOCKS,
            identity={"of": "a test"},
        )

    def registered(self) -> m.RegisterKVCache:
        """The next question is that, and is answered."""
        found = self.agent.question()
        assert isinstance(found, m.RegisterKVCache)
        self.agent.answer(m.Done(found.call_id))
        wait_until(lambda: self.worker.ready, "a registered worker")
        return found

    def start(self, agent_id: str = "agent") -> m.RegisterKVCache:
        self.register()
        self.welcome(agent_id)
        return self.registered()

    def close(self) -> None:
        self.worker.link.close()
        self.agent.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_operations_are_sent_as_the_agent_wants_them(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = node.start()
    assert node.worker.num_blocks_per_chunk() == 4  # of 64 tokens, whole blocks of both groups
    ranks = [share_rank(2, 1), share_rank(1, 0)]
    assert [each.kv_rank for each in names.groups] == ranks
    place = node.worker.place
    assert place is not None
    assert place.agent_id == "agent"
    assert [(part.worker_id, part.kv_rank, part.fingerprint) for part in place.parts] == [
        (1, each.kv_rank, each.fingerprint) for each in names.groups
    ]
    assert [each.place for each in node.told] == [place]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic_ns=lambda: 10**12))

    def lease(seconds: float) -> int:
        return 10**12 + round(seconds * 1e9)

    ops = [
        TransferOp([1, 2, 3, 4, 5, 6, 7, 8], [A, B], tenant="team"),
        # This replica stores the chunks whose hashes are odd.
        TransferOp([1, 2, 3, 4, 5, 6, 7, 8], [A, B, C, D], group=1),
    ]
    stores = node.worker.begin_stores(["r", "s"], ops)
    calls = [each.call.call_id for each in stores]
    assert node.agent.receive() == [
        m.Store(calls[0], "r", (A, B), (1, 2, 3, 4, 5, 6, 7, 8), lease(1.5), None, 0, "team"),
        m.Store(calls[1], "s", (B, D), (3, 4, 7, 8), lease(1.5), None, 1),
    ]
    assert [each.chunks for each in stores] == [2, 2]
    compared = node.worker.begin_stores(["s"], ops[1:], 7, compare=True)
    assert node.agent.receive() == [
        m.Compare(
            compared[0].call.call_id, "s", (A, B, C, D), (1, 2, 3, 4, 5, 6, 7, 8),
            lease(6.5), 7, 1,
        )
    ]  # fmt: skip
    loads = node.worker.begin_retrieves(
        ["r", "s"], [TransferOp([1, 2], [A], 1), TransferOp([3], [B], 1, group=1)], 9
    )
    # 16 tokens of two layers, 8 floats each; 32 tokens of one, 4 floats. 100 MB a second.
    of_groups = [2 * 16 * 2 * 8 * 4 / 100e6, 32 * 4 * 4 / 100e6]
    leases = [10**12 + int((5 + seconds) * 1e9) for seconds in of_groups]
    assert node.agent.receive() == [
        m.Retrieve(loads[0].call.call_id, "r", (A,), (1, 2), 16, leases[0], 9, 0),
        m.Retrieve(loads[1].call.call_id, "s", (B,), (3,), 32, leases[1], 9, 1),
    ]
    (short,) = node.worker.begin_retrieves(["r"], [TransferOp([1], [A])], lease_ns=5)
    assert short.lease_ns == 5
    node.agent.receive()
    assert short.given_up
    for call_id, answer in zip(
        calls, (m.StoreResult(calls[0], 1, 1, 0), m.Done(calls[1])), strict=True
    ):
        node.agent.answer(answer)
        assert stores[calls.index(call_id)].call.wait(WAIT_S)
    assert [(each.over, each.result) for each in stores] == [
        (True, m.StoreResult(calls[0], 1, 1, 0)),
        (True, m.StoreResult(0, 0, 0, 2)),  # no answer to a store: none of it is cached
    ]
    node.worker.hold_stores(True)
    (held,) = node.agent.receive()
    assert held == m.HoldStores(held.call_id, True)


def test_what_cannot_be_sent_holds_no_blocks(node: Node) -> None:
    """Lists that do not fit, and what is to come after a ticket that could not be recorded."""
    node.start()
    op = TransferOp([1], [A])
    for begin in (node.worker.begin_stores, node.worker.begin_retrieves):
        with pytest.raises(ValueError, match="zip"):
            begin(["r", "s"], [op])
    (store,) = node.worker.begin_stores(["r"], [op], NEVER)
    (load,) = node.worker.begin_retrieves(["r"], [op], NEVER)
    assert (store.over, load.over, load.given_up, load.failed_blocks) == (True, True, True, {1})
    assert not store.call.sent
    call = node.worker.hold_stores(False)
    assert node.agent.receive() == [m.HoldStores(call.call_id, False)], "nothing was sent before"


def test_an_agent_out_of_sight_gets_no_memory(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Its end could not be seen, and so not when the blocks are free again. The next one may."""
    node.register()
    node.welcome(process=NOWHERE)
    wait_until(lambda: "share one PID namespace" in caplog.text, "a refusal")
    (load,) = node.worker.begin_retrieves(["r"], [TransferOp([1], [A])])
    assert isinstance(node.agent.question(), m.Retrieve), "nothing was registered"
    node.agent.answer(m.Failure(0, m.UNKNOWN_PEER, "restarted"))
    assert load.call.wait(WAIT_S)
    assert (load.given_up, load.over) == (True, False)
    node.welcome("another")
    node.registered()
    assert load.over, "no agent writes through a mapping that another one has replaced"


@pytest.mark.parametrize("code", [m.REFUSED, m.UNKNOWN_PEER, m.FAILED])
def test_a_refused_registration_is_told(
    node: Node, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that has forgotten the worker meanwhile is asked again."""
    caplog.set_level(logging.ERROR)
    node.register()
    node.welcome()
    registration = node.agent.question()
    assert isinstance(registration, m.RegisterKVCache)
    node.agent.answer(m.Failure(registration.call_id, code, "because"))
    refusal = "the agent refused the KV cache: because"
    wait_until(lambda: refusal in caplog.messages, "a refusal")
    assert not node.worker.ready
    assert node.told == []
    last = node.worker._registration
    assert last is not None
    assert last.refusal == (None if code == m.UNKNOWN_PEER else refusal)
    if code == m.UNKNOWN_PEER:
        node.welcome()
        node.registered()
    assert node.worker.ready == (code == m.UNKNOWN_PEER)


def test_an_answer_of_another_kind_registers_nothing(node: Node) -> None:
    node.register()
    node.welcome()
    registration = node.agent.question()
    node.agent.answer(m.StoreResult(registration.call_id, 1, 0, 0))
    (store,) = node.worker.begin_stores(["r"], [TransferOp([1], [A])])
    assert isinstance(node.agent.question(), m.Store)
    assert not node.worker.ready
    assert node.told == []
    assert not store.over


def test_another_mapping_frees_the_blocks_of_a_lost_agent(node: Node) -> None:
    """Two agents live, as far as the worker knows: the first may resume inside a copy."""
    node.start("first")
    op = TransferOp([1, 2], [A])
    (store,) = node.worker.begin_stores(["r"], [op])
    (load,) = node.worker.begin_retrieves(["r"], [op])
    for _ in range(2):
        node.agent.question()
    node.agent.answer(m.Failure(0, m.UNKNOWN_PEER, "restarted"))
    for each in (store, load):
        assert each.call.wait(WAIT_S)
        assert each.call.lost
        assert not each.over
    assert load.failed_blocks == {1, 2}
    assert not node.worker.ready
    node.welcome("second")
    registration = node.agent.question()
    assert isinstance(registration, m.RegisterKVCache)
    assert not load.over, "it was sent, and is not mapped"
    node.agent.answer(m.Done(registration.call_id))
    wait_until(lambda: node.worker.ready, "a registered worker")
    assert load.over
    (later,) = node.worker.begin_retrieves(["s"], [op])
    node.agent.question()
    node.agent.answer(m.Failure(0, m.UNKNOWN_PEER, "restarted"))
    assert later.call.wait(WAIT_S)
    assert not later.over, "only a later mapping frees them"


def test_memory_is_free_once_the_agent_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    withdrawn: list[int] = []
    export = worker_module.export
    monkeypatch.setattr(export, "withdraw", lambda handles: withdrawn.append(len(handles)))
    assert node.worker.unregister(), "nobody has it"
    node.start()
    assert not node.worker.unregister()
    question = node.agent.question()
    assert isinstance(question, m.UnregisterKVCache)
    assert not node.worker.ready
    (store,) = node.worker.begin_stores(["r"], [TransferOp([1], [A])])
    assert (store.call.lost, store.call.sent) == (True, False), "what it names may be mapped still"
    assert not node.worker.unregister(0.01), "it was asked, and has not answered"
    assert withdrawn[-2:] == [3, 0], "its own descriptors are closed, once"
    node.agent.answer(m.Done(question.call_id))
    wait_until(node.worker.unregister, "an answer")
    node.register()
    node.registered()
    assert not node.worker.unregister()
    question = node.agent.question()
    node.agent.answer(m.Failure(question.call_id, m.FAILED, "a driver hangs"))
    assert not node.worker.unregister(WAIT_S)


def test_a_welcome_meanwhile_does_not_register_twice(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads register. The second would unmap what a store after the first's answer reads."""
    monkeypatch.setattr(worker_module.export, "withdraw", lambda storages: node.welcome())
    node.register()
    monkeypatch.undo()
    node.registered()
    node.worker.unregister()
    assert isinstance(node.agent.question(), m.UnregisterKVCache)
    assert not node.worker.ready
