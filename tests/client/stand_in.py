# SPDX-License-Identifier: Apache-2.0
"""A socket that stands in for an agent's."""

from __future__ import annotations

from pathlib import Path

import zmq

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.transport import bind_router

WAIT_S = 60.0


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
            self.peer, *frames = self.router.recv_multipart()
            questions = [transport.decode_question(each) for each in transport.split(frames)]
            if not isinstance(questions[0], m.Ping):
                return questions

    def answer(self, answer: m.Answer) -> None:
        self.router.send_multipart([self.peer, *transport.encode(answer)])

    def close(self) -> None:
        self.router.close()
        self._context.term()
