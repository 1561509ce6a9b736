"""A conversation on one connection: commands may be sent before earlier replies have come.

Replies come in order. What nobody has received when the conversation is over has to be (`finish`)
before the connection can be used for anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp.connection import Connection
from lmcache_redis.resp.wire import Reply, without_errors

# Requests that go out on the thread of a caller, who has other things to do.
_AT_ONCE = 2


class Talk:
    """On a connection that is open; everything ends by `deadline` (`time.monotonic()`).

    Every method raises what `Connection.exchange` does.
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.outstanding = 0
        self._connection = connection
        self._deadline = deadline
        # What `send_at_once` left.
        self._unsent: Iterable[bytes] = ()

    def send(self, requests: Iterable[bytes], replies: int) -> None:
        """Send packed commands, to which there will be so many replies.

        The server works on what was sent while more of `requests` is made.
        """
        self._send_rest()
        self._connection.send(requests, self._deadline)
        self.outstanding += replies

    def send_at_once(self, requests: Iterator[bytes], replies: int) -> None:
        """As `send`, but never waits nor raises: what does not go out now goes before what follows.

        Takes the first few of `requests`. Only as the first of a conversation.
        """
        left: tuple[bytes, ...] = ()
        for request in itertools.islice(requests, _AT_ONCE):
            sent = self._connection.send_at_once(request)
            if sent < len(request):
                left = (request[sent:],)
                break
        self._unsent = itertools.chain(left, requests)
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

    def _send_rest(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, ()
            self._connection.send(unsent, self._deadline)

    def _receive(self, least: int) -> Sequence[Reply]:
        self._send_rest()
        replies = self._connection.receive_replies(self._deadline, least)
        if len(replies) > self.outstanding:
            self._connection.fail(RedisProtocolError("more replies came than were asked for"))
        self.outstanding -= len(replies)
        if not self.outstanding:
            self._connection.check_in_step()
        return replies
