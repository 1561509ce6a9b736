# SPDX-License-Identifier: Apache-2.0
"""A socket that stands in for an agent's."""

from __future__ import annotations

from pathlib import Path

import zmq

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.client.link import AgentLink
from lmcache_redis.transport import bind_router

WAIT_S = 60.0


def welcome(
    hello: m.Question, agent_id: str = "agent", process: tuple[int, int] = (1, 2)
) -> m.Welcome:
    """Of an agent whose chunks are no whole blocks of 16 tokens."""
    return m.Welcome(hello.call_id, agent_id, *process, 50, 60.0, "0")


class Agent:
    """An agent's socket, which the test reads and answers."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self.endpoint = f"ipc://{directory}/agent.sock"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = bind_router(self._context, self.endpoint)

    def receive(self) -> list[m.Question]:
        """The questions of the next message that is no heartbeat."""
        while True:
            assert self.router.poll(WAIT_S * 1000)
            if questions := self._read():
                return questions

    def question(self) -> m.Question:
        """The next one, which is no HELLO."""
        while isinstance(found := self.receive()[0], m.Hello):
            pass
        return found

    def answer(self, answer: m.Answer) -> None:
        self.router.send_multipart([self.peer, *transport.encode(answer)])

    def welcome(
        self, link: AgentLink, agent_id: str = "agent", process: tuple[int, int] = (1, 2)
    ) -> m.Hello:
        """Answers HELLO, which a link repeats, until it takes the answer."""
        former = link.welcome
        while link.welcome is former:
            if self.router.poll(20) and (questions := self._read()):
                (hello,) = questions
                assert isinstance(hello, m.Hello)
                self.answer(welcome(hello, agent_id, process))
        assert link.wait_for(lambda: link.online or link.refusal is not None, WAIT_S)
        return hello

    def close(self) -> None:
        self.router.close()
        self._context.term()

    def _read(self) -> list[m.Question]:
        """Of a message; none of a heartbeat."""
        self.peer, *frames = self.router.recv_multipart()
        questions = [transport.decode_question(each) for each in transport.split(frames)]
        return [] if isinstance(questions[0], m.Ping) else questions
