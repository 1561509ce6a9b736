"""Clients of the server that a URL names. The only place where the admin tools make one.

Everything else asks `Server.nodes`: the processes that hold keys, one for a single server.
Replies are those of the data plane's reader, bounded as it bounds them, each by its deadline.
No message contains a secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_redis.errors import (
    RedisAuthError,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.commands import CommandClient, Question
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.wire import PING_COMMAND, ErrorReply, error_of, pack_command

CLIENT_NAME = "lmcache-redis-admin"
CONNECT_TIMEOUT_S = 3.0
# A SCAN step or a pipeline of a thousand small commands, on a server that is busy.
OP_TIMEOUT_S = 10.0
# What a server that was not told otherwise holds in one string (proto-max-bulk-len).
MAX_STRIPE_BYTES = 512 << 20

Command = tuple[bytes | str | int, ...]


@dataclass(eq=False)
class Node:
    """One process that holds keys.

    untouched: reading a value here does not count as a use (CLIENT NO-TOUCH, Redis 7.2), so
    that looking at the cache changes neither ages nor what is evicted next.
    """

    endpoint: Endpoint
    client: CommandClient = dataclasses.field(repr=False)
    untouched: bool = False

    @property
    def where(self) -> str:
        return self.endpoint.where

    def ask(self, *command: bytes | str | int) -> Any:
        """The reply to one command. Raises RedisError."""
        (reply,) = self.ask_all([command])
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to commands sent at once, an error reply as a RedisError in its place.

        Raises RedisError where the connection fails.
        """
        if not commands:
            return []
        packed = [pack_command(*command) for command in commands]
        try:
            replies = self.client.exchange(self.endpoint, packed, _deadline())
        except RedisError as error:
            raise _lost(error, self.where) from None
        return [_said(r, self.where) if isinstance(r, ErrorReply) else r for r in replies]

    def scan(self, pattern: bytes, step_keys: int) -> Iterator[tuple[list[bytes], bool]]:
        """The strings that each SCAN finds, and whether it was the last. Raises RedisError."""
        try:
            yield from self.client.scan_steps(self.endpoint, pattern, step_keys, _deadline)
        except RedisError as error:
            raise _lost(error, self.where) from None

    def get(self, key: bytes, payload_bytes: int) -> tuple[bytes, memoryview] | None:
        """The header and the payload of a value; None if it is not there, or has another length.

        Raises RedisError.
        """
        if payload_bytes > MAX_STRIPE_BYTES:
            raise RedisProtocolError(f"a value of {payload_bytes:,} bytes at Redis at {self.where}")
        payload = memoryview(bytearray(payload_bytes))
        try:
            header = self.client.get(self.endpoint, key, payload, _deadline())
        except RedisError as error:
            raise _lost(error, self.where) from None
        return None if header is None else (header, payload)


@dataclass(frozen=True, slots=True)
class Server:
    """Where keys are: at least one node, each key on exactly one of them.

    client: what all of them are asked by.
    """

    nodes: tuple[Node, ...]
    client: CommandClient = dataclasses.field(repr=False)

    @property
    def where(self) -> str:
        return ", ".join(node.where for node in self.nodes)

    @property
    def untouched(self) -> bool:
        return all(node.untouched for node in self.nodes)

    def node_of(self, key: bytes) -> Node:
        """The node that holds `key`. Raises RedisUnavailable where none does."""
        endpoint = self.client.routes(_deadline()).node_of(key)
        for node in self.nodes:
            if node.endpoint == endpoint:
                return node
        raise RedisUnavailable(
            f"no server of the cluster at {self.where} has the slot of this key: see "
            "`redis-cli --cluster check`"
        )

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over nodes by their slots."""
        return self.client.is_cluster

    def ask_all(self, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
        """Replies to (key, command) pairs, each asked of its key's node, in the given order.

        On one node the commands are carried out in that order. Raises as `Node.ask_all`.
        """
        questions = [Question(key, pack_command(*command)) for key, command in commands]
        answers = self.client.ask(questions, _deadline())
        failure = next((each for each in answers if isinstance(each, RedisError)), None)
        if failure is not None:
            raise _lost(failure, self.where) from None
        return [_said(r, self.where) if isinstance(r, ErrorReply) else r for r in answers]


@contextlib.contextmanager
def open_server(options: RedisOptions) -> Iterator[Server]:
    """The servers that `options` name, each connected; closed on exit.

    Raises ConfigError for a URL that is none, and RedisError, saying what to change, where
    the server cannot be reached or does not let us in.
    """
    options = dataclasses.replace(
        options, connect_timeout_s=CONNECT_TIMEOUT_S, op_timeout_s=OP_TIMEOUT_S
    )
    client = CommandClient(options, CLIENT_NAME, pack_command("CLIENT", "NO-TOUCH", "ON"))
    try:
        endpoints = client.routes(_deadline()).nodes
        nodes = {endpoint: Node(endpoint, client) for endpoint in endpoints}
        for endpoint, node in nodes.items():
            (reply,) = client.exchange(endpoint, [PING_COMMAND], _deadline())
            if isinstance(reply, ErrorReply):
                raise _said(reply, endpoint.where)
            node.untouched = client.accepts_setup(endpoint)
        yield Server(tuple(nodes.values()), client)
    finally:
        client.close()


def _deadline() -> float:
    return time.monotonic() + OP_TIMEOUT_S


def _lost(error: RedisError, where: str) -> RedisError:
    """What to say where a question to a server that was there had no answer."""
    at = f"Redis at {where}"
    if isinstance(error, RedisTimeout):
        return RedisTimeout(f"{at} did not answer within {OP_TIMEOUT_S:g} s: is it overloaded?")
    if isinstance(error, RedisUnavailable):
        return RedisUnavailable(f"the connection to {at} was lost: try again ({error})")
    return error


def _said(reply: ErrorReply, where: str) -> RedisError:
    """The exception that stands for an error reply."""
    at = f"Redis at {where}"
    text = " ".join(reply.text.split())[:160]
    error = error_of(reply)
    if reply.code == "NOPERM":
        return RedisAuthError(
            f"{at} does not allow it to this user ({text}): inspect and purge need +@read and "
            "+unlink on the agents' keys"
        )
    if isinstance(error, RedisAuthError):
        return RedisAuthError(f"{at} refuses the user or the password: {text}")
    if isinstance(error, RedisFull):
        return RedisFull(f"{at} is full and evicts nothing: {text}")
    if reply.code == "LOADING":
        return RedisUnavailable(f"{at} is still loading its data: try again when it is done")
    return RedisReplyError(f"{at} says: {text}")
