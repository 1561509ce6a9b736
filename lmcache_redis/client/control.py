"""Requests of command-line tools to an agent: ping and status."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq

from lmcache_redis import messages as m
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.transport import connect_dealer

_A = TypeVar("_A", bound=m.Message)


class AgentUnreachable(LMCacheRedisError):
    """No agent answered at the endpoint in time."""


@dataclass(frozen=True)
class PingInfo:
    """An answered ping."""

    round_trip_s: float
    agent_pid: int
    version: str


class ControlClient:
    """Sends requests to the agent at ``endpoint``; each waits at most ``timeout_s``."""

    def __init__(self, endpoint: str, timeout_s: float = 2.0) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    def ping(self) -> PingInfo:
        """Measures a round trip. Raises ``AgentUnreachable``."""
        started_s = time.perf_counter()
        pong = self._ask(m.Ping(1), m.Pong)
        return PingInfo(time.perf_counter() - started_s, pong.agent_pid, pong.package_version)

    def status(self) -> dict[str, Any]:
        """The agent's state and counters. Raises ``AgentUnreachable``."""
        report: dict[str, Any] = msgspec.json.decode(self._ask(m.Status(1), m.StatusReport).report)
        return report

    def _ask(self, question: m.Message, expected: type[_A]) -> _A:
        deadline_s = time.monotonic() + self._timeout_s
        with zmq.Context() as context, connect_dealer(context, self._endpoint) as dealer:
            for event in (zmq.POLLOUT, zmq.POLLIN):
                left_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
                if not dealer.poll(left_ms, event):
                    raise AgentUnreachable(
                        f"no agent answers at {self._endpoint}: start one with "
                        "`lmcache-redis agent`, or pass its --endpoint"
                    )
                if event == zmq.POLLOUT:
                    dealer.send_multipart(m.encode(question))
            answer = m.decode_answer(dealer.recv_multipart())
        if isinstance(answer, expected):
            return answer
        reason = answer.reason if isinstance(answer, m.Failure) else type(answer).__name__
        raise LMCacheRedisError(f"the agent at {self._endpoint} answered: {reason}")
