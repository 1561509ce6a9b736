"""Who may connect while file descriptors are short: those who are connected already."""

from __future__ import annotations

import logging
import os
import resource

import zmq

from lmcache_redis.config import endpoint_path
from lmcache_redis.processes import free_descriptors
from lmcache_redis.transport import hidden_path

logger = logging.getLogger(__name__)

# An eighth of the limit is for what the agent opens meanwhile (files of the disk tier, connections
# to Redis), and for connections that are accepted before it notices.
_LEAST_RESERVE, _MOST_RESERVE = 64, 1024


class Admission:
    """Lets no new peers in while file descriptors are short. Owned by the loop thread.

    Each engine takes a descriptor for its connection and one for each piece of its memory. libzmq
    ends the process if it cannot accept a connection for want of one, and cannot be told to stop
    accepting without losing the connections that it has. So the socket's file is renamed: new peers
    do not find it, and connected ones are served on. It has its name again when descriptors are
    free.

    accepted: readable after a connection, so that a crowd is noticed while it comes.
    """

    def __init__(self, router: zmq.Socket[bytes], endpoint: str) -> None:
        self.accepted = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self.is_open = True
        self._router = router
        self._path = endpoint_path(endpoint)
        self._hidden = hidden_path(self._path)
        self._is_stuck = False

    def check(self) -> None:
        """Shuts the way if descriptors are short, and opens it again."""
        while self.accepted.poll(0):
            self.accepted.recv_multipart()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = min(max(_LEAST_RESERVE, limit // 8), _MOST_RESERVE, limit // 4)
        free = free_descriptors()
        if self.is_open and free < reserve:
            self._shut(free, limit)
        elif not self.is_open and free >= reserve + reserve // 4:
            self._reopen()

    def close(self) -> None:
        """Gives the socket's file its name back."""
        if not self.is_open:
            self._reopen()
        self._router.disable_monitor()
        self.accepted.close(linger=0)

    def _shut(self, free: int, limit: int) -> None:
        try:
            os.rename(self._path, self._hidden)
        except OSError as error:
            logger.error("the socket %s cannot be renamed: %s", self._path, error)
            return
        self.is_open = False
        logger.error(
            "too few file descriptors are free (%d of %d): no engine or tool can connect to %s "
            "until there are more; raise the limit (ulimit -n, LimitNOFILE of systemd)",
            free, limit, self._path,
        )  # fmt: skip

    def _reopen(self) -> None:
        try:
            os.link(self._hidden, self._path)  # unlike a rename, replaces no other agent's socket
            os.unlink(self._hidden)
        except OSError as error:
            if not self._is_stuck:
                logger.error("the socket %s cannot be opened again: %s", self._path, error)
            self._is_stuck = True
            return
        self.is_open, self._is_stuck = True, False
        logger.info("file descriptors are free: engines can connect to %s again", self._path)
