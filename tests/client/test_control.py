# SPDX-License-Identifier: Apache-2.0
"""Requests of tools: what is said of an agent that goes away, or answers something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.client.control import AgentUnreachable, ControlClient
from lmcache_redis.config import default_endpoint
from lmcache_redis.errors import LMCacheRedisError


@contextmanager
def agent_that(
    directory: Path, answer: Callable[[m.Question], m.Answer | None]
) -> Iterator[ControlClient]:
    """A client of one that answers one question. Without an answer it closes its socket."""
    endpoint, context, asked = f"ipc://{directory}/agent.sock", zmq.Context(), threading.Event()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)

    def serve() -> None:
        identity, *frames = router.recv_multipart()
        answered = answer(transport.decode_question(frames))
        if answered is not None:
            router.send_multipart([identity, *transport.encode(answered)])
            asked.wait()
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ControlClient(endpoint, timeout_s=30)
    finally:
        asked.set()
        thread.join()
        context.term()


def test_an_agent_that_goes_away_is_noticed_at_once(tmp_path: Path) -> None:
    with (
        agent_that(tmp_path, lambda question: None) as client,
        pytest.raises(AgentUnreachable, match="went away before it answered"),
    ):
        client.trust()


def test_users_are_told_how_to_ask_the_agent_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory belongs to another user, so its socket is not visible."""
    monkeypatch.delenv("LMCACHE_REDIS_ENDPOINT", raising=False)
    monkeypatch.setattr("lmcache_redis.config._SERVICE_DIRECTORY", Path("/"))
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    client = ControlClient(default_endpoint(), timeout_s=0.1)
    with pytest.raises(AgentUnreachable, match="runs as root: ask it as `sudo -u root lmcache-red"):
        client.trust()
    with pytest.raises(AgentUnreachable, match="start one with"):
        ControlClient(f"ipc://{tmp_path}/agent.sock", timeout_s=0.1).trust()


def test_an_agent_that_does_not_know_the_question(tmp_path: Path) -> None:
    refused = m.Failure(1, m.BAD_MESSAGE, "Invalid value 'TRUST'")
    with (
        agent_that(tmp_path, lambda question: refused) as client,
        pytest.raises(LMCacheRedisError, match=r"Invalid value 'TRUST' \(is it of another version"),
    ):
        client.trust()
