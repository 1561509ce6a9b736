# SPDX-License-Identifier: Apache-2.0
"""A worker's registrations, which two threads send: with the KV cache, and with each WELCOME."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.device import export
from lmcache_redis.processes import process_start_time
from tests.client.stand_in import Agent
from tests.harness import WAIT_S, wait_until


def test_a_welcome_meanwhile_does_not_register_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would unmap what a store that follows the first one's answer reads."""
    agent = Agent(tmp_path)
    worker = WorkerClient(agent.endpoint, "m", 1, 0, 16, engine_id="e", agent_dead_after_s=WAIT_S)
    pid = os.getpid()
    started = process_start_time(pid)
    assert started is not None

    def welcomed_here(storages: object) -> None:
        while not worker.link.online:  # a HELLO that was repeated is out of date
            (hello,) = agent.receive()
            agent.answer(m.Welcome(hello.call_id, "agent", pid, started, 64, 1.0, "0"))
            worker.link.wait_for(lambda: worker.link.online, 0.1)

    def question() -> m.Question:
        while isinstance(found := agent.receive()[0], m.Hello):
            pass
        return found

    monkeypatch.setattr(export, "withdraw", welcomed_here)
    caches = {"layer": torch.zeros(2, 24, 16, 2, 8)}
    worker.register_groups([CacheGroup(caches, "float32", 16)], num_blocks=24, identity={})
    monkeypatch.undo()
    registration = question()
    assert isinstance(registration, m.RegisterKVCache)
    agent.answer(m.Done(registration.call_id))
    wait_until(lambda: worker.ready, "a registration")
    worker.unregister()
    unregistration = question()
    assert isinstance(unregistration, m.UnregisterKVCache)
    assert not worker.ready
    agent.answer(m.Done(unregistration.call_id))
    worker.shutdown()
    agent.close()
