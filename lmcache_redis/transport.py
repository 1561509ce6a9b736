"""Every ZeroMQ socket of the project is made here, with the reasons for its options.

Engine side DEALER, agent side ROUTER. Frames are opaque to this module, but for their size: one
that is larger than a message may be is not received, and its connection is closed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import zmq

from lmcache_redis.config import endpoint_path, why_unsafe
from lmcache_redis.errors import ConfigError
from lmcache_redis.messages import MAX_MESSAGE_BYTES

# Messages of one peer that wait to be read, or to be sent: more of an engine's wait at its side,
# more answers for one that reads none are dropped.
_INBOX = 64
_OUTBOX = 1_000


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A ROUTER bound to ``endpoint``. Raises ``ConfigError`` where it cannot be bound."""
    _clear_stale_socket(endpoint_path(endpoint), endpoint)
    router = context.socket(zmq.ROUTER)
    # A closing agent has answered what it could; nothing is worth waiting for.
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, _OUTBOX)
    router.setsockopt(zmq.RCVHWM, _INBOX)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # A reconnecting client may come back under its identity before its old
    # connection is noticed to be gone.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close()
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"the endpoint {endpoint} is in use: another agent runs on this node; "
                "stop it or choose another --endpoint"
            ) from error
        raise ConfigError(f"cannot listen on --endpoint {endpoint}: {error.strerror}") from error
    return router


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A DEALER that connects to ``endpoint``, now or when somebody listens there."""
    dealer = _dealer(context)
    _connect(dealer, endpoint)
    return dealer


def connect_watched_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The same, and a monitor that tells of each EVENT_CONNECTED and EVENT_DISCONNECTED."""
    dealer = _dealer(context)
    # Before it connects: the first connection would be missed.
    monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
    try:
        _connect(dealer, endpoint)
    except ConfigError:
        monitor.close(linger=0)
        raise
    return dealer, monitor


def _dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, _OUTBOX)
    dealer.setsockopt(zmq.RCVHWM, _OUTBOX)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # An agent that comes back is found within a tenth of a second.
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    # Nothing is queued for an agent that is not there: it would be stale when it comes.
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    return dealer


def _connect(dealer: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close()
        raise ConfigError(f"{endpoint!r} is no endpoint of an agent: use ipc://PATH") from error


def distrust(endpoint: str) -> str | None:
    """Why whoever listens at ``endpoint`` must not be believed, or None.

    An agent writes into an engine's memory: others must not be able to put a socket there.
    """
    try:
        return why_unsafe(endpoint_path(endpoint).parent)
    except OSError:
        return None  # nobody can listen there


def _clear_stale_socket(path: Path, endpoint: str) -> None:
    """Removes a socket that nobody listens on; refuses one that somebody does."""
    import socket

    if not path.exists():
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} is in the way of --endpoint {endpoint} ({error.strerror}); "
            "remove it or choose another --endpoint"
        ) from error
    else:
        raise ConfigError(
            f"the endpoint {endpoint} is in use: another agent runs on this node; "
            "stop it or choose another --endpoint"
        )
    finally:
        probe.close()


class Wakeup:
    """Wakes a thread that polls ``fd`` from any other thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a signal handler may ring while this thread is ringing.
        self._lock = threading.RLock()
        self._closed = False

    def set(self) -> None:
        """Makes ``fd`` readable. Harmless after ``close``."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Makes ``fd`` unreadable until the next ``set``."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Gives the descriptor back."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
