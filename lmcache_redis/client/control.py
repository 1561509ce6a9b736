# SPDX-License-Identifier: Apache-2.0
"""Requests of command-line tools to an agent: ping, status, trust, and why requests missed."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.config import check_endpoint, default_endpoint, service_user
from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.units import printable_document

_A = TypeVar("_A", bound=m.Message)
# Between two tries to send, until the agent is there.
_RETRY_S = 0.002


class AgentUnreachable(LMCacheRedisError):
    """No agent answered at the endpoint in time."""


class ControlClient:
    """Sends requests to the agent at ``endpoint``; each waits at most ``timeout_s``.

    Raises ``ConfigError`` for what is no endpoint, or one where others could have put a socket.
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

    def layouts(self, *wanted: str) -> dict[str, Any]:
        """The layouts that the agent knows, see `messages.Layouts`. Raises ``AgentUnreachable``."""
        return self._report(m.Layouts(1, wanted))

    def trust(self) -> int:
        """Has the agent load everything again; of how many layouts it did not. As `status`."""
        return self._ask(m.Trust(1), m.Done).count

    def _report(self, question: m.Message) -> dict[str, Any]:
        found = msgspec.json.decode(self._ask(question, m.StatusReport).report)
        report: dict[str, Any] = printable_document(found)
        return report

    def _ask(self, question: m.Message, expected: type[_A]) -> _A:
        socket = transport.AgentSocket(self._endpoint)
        try:
            answer = transport.decode_answer(self._answer_to(question, socket))
        finally:
            socket.close()
        if isinstance(answer, expected):
            return answer
        reason = answer.reason if isinstance(answer, m.Failure) else type(answer).__name__
        if isinstance(answer, m.Failure) and answer.code == m.BAD_MESSAGE:
            reason += " (is it of another version? `lmcache-redis ping` shows it)"
        raise LMCacheRedisError(f"the agent at {self._endpoint} answered: {reason}")

    def _answer_to(self, question: m.Message, socket: transport.AgentSocket) -> list[bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        is_sent = False
        while (left_s := deadline_s - time.monotonic()) > 0:
            is_sent = is_sent or socket.send(transport.encode(question))
            has_messages, has_events = socket.wait(left_s if is_sent else _RETRY_S)
            if has_messages:
                return next(socket.received())
            if has_events and not socket.connected() and is_sent:
                raise AgentUnreachable(
                    f"the agent at {self._endpoint} went away before it answered: see its log"
                )
        raise AgentUnreachable(f"no agent answers at {self._endpoint}: {self._advice()}")

    def _advice(self) -> str:
        user = service_user()
        if user is None or self._endpoint != default_endpoint():
            return "start one with `lmcache-redis agent`, or pass its --endpoint"
        return f"this node's service runs as {user}: ask it as `sudo -u {user} lmcache-redis ...`"
