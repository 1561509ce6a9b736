"""A conversation on one connection: commands may be sent before earlier replies have come.

Replies come in order. What nobody has received when the conversation is over has to be (`finish`)
before the connection can be used for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp.connection import Connection
from lmcache_redis.resp.wire import Reply, without_errors


class Talk:
    """On a connection that is open; everything ends by `deadline` (`time.monotonic()`).

    Every method raises what `Connection.exchange` does.
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.outstanding = 0
        self._connection = connection
        self._deadline = deadline

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        """Send packed commands, to which there will be so many replies.

        The server works on what was sent while more of `requests` is made.
        """
        self._connection.send(requests, self._deadline)
        self.outstanding += replies

    def receive(self, least: int) -> Sequence[Reply]:
        """The next replies, at least so many; raises the first error among them."""
        return without_errors(self._receive(least))

    def exchange(self, requests: Iterable[bytes], replies: int) -> Sequence[Reply]:
        """`send`, and all replies, errors among them. Only where none is outstanding."""
        self.send(requests, replies)
        return self._receive(replies)

    def call(self, requests: Iterable[bytes], replies: int) -> Sequence[Reply]:
        """`exchange`, but the first error is raised."""
        return without_errors(self.exchange(requests, replies))

    def finish(self, deadline: float) -> None:
        """Receive what is still outstanding, and forget it."""
        self._deadline = deadline
        if self.outstanding:
            self._receive(self.outstanding)

    def _receive(self, least: int) -> Sequence[Reply]:
        replies = self._connection.receive_replies(self._deadline, least)
        if len(replies) > self.outstanding:
            self._connection.fail(RedisProtocolError("more replies came than were asked for"))
        self.outstanding -= len(replies)
        if not self.outstanding:
            self._connection.check_in_step()
        return replies
