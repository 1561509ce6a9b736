"""Requests of command-line tools to an agent: ping, status, trust, and why requests missed."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.config import check_endpoint, default_endpoint
from lmcache_redis.errors import ConfigError, LMCacheRedisError

_A = TypeVar("_A", bound=m.Message)


class AgentUnreachable(LMCacheRedisError):
    """No agent answered at the endpoint in time."""


class ControlClient:
    """Sends requests to the agent at ``endpoint``; each waits at most ``timeout_s``.

    Raises ``ConfigError`` for an endpoint that is none, and for the default one if others could
    have put a socket there.
    """

    def __init__(self, endpoint: str, timeout_s: float = 2.0) -> None:
        check_endpoint(endpoint)
        if endpoint == default_endpoint() and (why := transport.why_untrusted(endpoint)):
            raise ConfigError(f"the agent at {endpoint} is not trusted: {why}")
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    def ping(self) -> tuple[m.Pong, float]:
        """The answer to a ping, and the seconds of the round trip. Raises ``AgentUnreachable``."""
        started_s = time.perf_counter()
        pong = self._ask(m.Ping(1), m.Pong)
        return pong, time.perf_counter() - started_s

    def status(self) -> dict[str, Any]:
        """The agent's state and counters. Raises ``AgentUnreachable``."""
        return self._report(m.Status(1))

    def why(self, request: str = "", most: int = 20) -> dict[str, Any]:
        """What became of requests, see `messages.Why`. Raises ``AgentUnreachable``."""
        return self._report(m.Why(1, request, most))

    def layouts(self, *wanted: str) -> list[dict[str, Any]]:
        """The layouts that the agent knows, see `messages.Layouts`. Raises ``AgentUnreachable``."""
        rows: list[dict[str, Any]] = self._report(m.Layouts(1, wanted))["layouts"]
        return rows

    def trust(self) -> int:
        """Has the agent load everything again; how many layouts it did not. See `agent.trust`.

        Raises ``AgentUnreachable``.
        """
        return self._ask(m.Trust(1), m.Done).count

    def _report(self, question: m.Message) -> dict[str, Any]:
        report: dict[str, Any] = msgspec.json.decode(self._ask(question, m.StatusReport).report)
        return report

    def _ask(self, question: m.Message, expected: type[_A]) -> _A:
        with zmq.Context() as context:
            dealer, monitor = transport.connect_watched_dealer(context, self._endpoint)
            try:
                deadline_s = time.monotonic() + self._timeout_s
                if not dealer.poll(_left_ms(deadline_s), zmq.POLLOUT):
                    raise self._unreachable()
                dealer.send_multipart(transport.encode(question))
                frames = self._receive(dealer, monitor, deadline_s)
            finally:
                dealer.disable_monitor()
                monitor.close(linger=0)
                dealer.close()
        return self._expected(transport.decode_answer(frames), expected)

    def _receive(
        self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], deadline_s: float
    ) -> list[bytes]:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while ready := dict(poller.poll(_left_ms(deadline_s))):
            if dealer in ready:
                return dealer.recv_multipart()
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                raise AgentUnreachable(
                    f"the agent at {self._endpoint} went away before it answered: see its log"
                )
        raise self._unreachable()

    def _expected(self, answer: m.Answer, expected: type[_A]) -> _A:
        if isinstance(answer, expected):
            return answer
        reason = answer.reason if isinstance(answer, m.Failure) else type(answer).__name__
        if isinstance(answer, m.Failure) and answer.code == m.BAD_MESSAGE:
            reason += " (is it of another version? `lmcache-redis ping` shows it)"
        raise LMCacheRedisError(f"the agent at {self._endpoint} answered: {reason}")

    def _unreachable(self) -> AgentUnreachable:
        return AgentUnreachable(
            f"no agent answers at {self._endpoint}: start one with "
            "`lmcache-redis agent`, or pass its --endpoint"
        )


def _left_ms(deadline_s: float) -> int:
    return max(0, int((deadline_s - time.monotonic()) * 1000))
