"""All ZeroMQ sockets of the project, and the reasons for their options.

The engine side is a DEALER, the agent side a ROUTER. A frame larger than ``MAX_MESSAGE_BYTES`` is
not received: ZeroMQ closes the connection.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import zmq

from lmcache_redis.config import endpoint_path, why_unsafe
from lmcache_redis.errors import ConfigError
from lmcache_redis.messages import MAX_MESSAGE_BYTES

# Messages queued per peer. When the inbox is full, messages queue on the engine's side. When the
# outbox is full, answers to a peer that does not read are dropped.
_INBOX = 64
_OUTBOX = 1_000


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A ROUTER bound to ``endpoint``. Raises ``ConfigError`` if it cannot be bound."""
    _clear_stale_socket(endpoint_path(endpoint), endpoint)
    router = context.socket(zmq.ROUTER)
    # Unless it is closed with a time, it does not wait for peers to read.
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, _OUTBOX)
    router.setsockopt(zmq.RCVHWM, _INBOX)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # A client may reconnect under its identity before the ROUTER notices the loss of its old
    # connection.
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


def connect_watched_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER that connects to ``endpoint`` as soon as an agent listens there, and its monitor.

    The monitor has EVENT_HANDSHAKE_SUCCEEDED, from which on the DEALER sends, and
    EVENT_DISCONNECTED.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, _OUTBOX)
    dealer.setsockopt(zmq.RCVHWM, _OUTBOX)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # A restarted agent is found within 100 ms.
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    # No messages are queued for an absent agent: they would be stale when it starts.
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    # Before it connects, so that no event is missed.
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close()
        monitor.close(linger=0)
        raise ConfigError(f"{endpoint!r} is not an agent's endpoint: use ipc://PATH") from error
    return dealer, monitor


def why_untrusted(endpoint: str) -> str | None:
    """Why a listener at ``endpoint`` cannot be trusted, or None.

    An agent writes into an engine's memory: other users must not be able to create the socket.
    """
    try:
        return why_unsafe(endpoint_path(endpoint).parent)
    except OSError:
        return None  # no directory, so no listener


def _clear_stale_socket(path: Path, endpoint: str) -> None:
    """Removes a socket without a listener. Raises ``ConfigError`` if anything else is there."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(
            f"--endpoint {endpoint} cannot be used: {path} is not a socket; choose another one"
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--endpoint {endpoint} cannot be used: {path} exists ({error.strerror}); "
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
    """Lets any thread wake a thread that polls ``fd``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a signal handler may call `set` while this thread is inside it.
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
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
