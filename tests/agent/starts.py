# SPDX-License-Identifier: Apache-2.0
"""Agents and engines that a test starts, and that end with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

from tests.harness import AgentServer, Engine

_T = TypeVar("_T")


class Starts:
    """`agent, engine = start()`, as the fixture `start`. What began last ends first.

    An agent uses the test's Redis, unless another `url` is given.
    """

    def __init__(self, stack: ExitStack, directory: Path, url: str) -> None:
        self._stack = stack
        self._directory = directory
        self._url = url

    def __call__(self, name: str = "agent", **options: Any) -> tuple[AgentServer, Engine]:
        """options: of the agent."""
        agent = self.agent(name, **options)
        return agent, self.engine(agent)

    def agent(self, name: str = "agent", url: str | None = None, **options: Any) -> AgentServer:
        server = AgentServer(self._directory / name, url or self._url, **options)
        return self.enter(server)

    def engine(self, agent: AgentServer, **options: Any) -> Engine:
        return self.enter(Engine(agent.endpoint, **options))

    def enter(self, started: AbstractContextManager[_T]) -> _T:
        return self._stack.enter_context(started)
