# SPDX-License-Identifier: Apache-2.0
"""Messages as frames, and the ZeroMQ sockets that carry them: a DEALER of an engine, the ROUTER.

While file descriptors are short, the ROUTER serves only those who are connected (`Admission`).
A frame larger than ``MAX_MESSAGE_BYTES`` is not received: ZeroMQ closes the connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_redis import messages as m
from lmcache_redis.config import endpoint_path, why_unsafe
from lmcache_redis.errors import ConfigError, StartError, WireError
from lmcache_redis.processes import free_descriptors

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Messages queued per peer. When the inbox is full, messages queue on the engine's side. When the
# outbox is full, answers to a peer that does not read are dropped.
_INBOX = 64
# Connections that wait to be accepted, fewer than the descriptors that `Admission` reserves.
_BACKLOG = 32
# An eighth of the limit is for what the agent opens meanwhile (files of the disk tier, connections
# to Redis), and for connections that are accepted before it notices.
_LEAST_RESERVE, _MOST_RESERVE = 64, 1024
_OUTBOX = 1_000
# Exceptions that msgspec raises for malformed bytes.
_NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class VersionMismatch(WireError):
    """The peer uses another version of the protocol."""


class _Envelope(msgspec.Struct):
    call_id: int = 0


_encoder = msgspec.msgpack.Encoder()
_question_decoder: msgspec.msgpack.Decoder[m.Question] = msgspec.msgpack.Decoder(m.Question)
_answer_decoder: msgspec.msgpack.Decoder[m.Answer] = msgspec.msgpack.Decoder(m.Answer)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode(*messages: m.Message) -> list[bytes]:
    """The frames of a message: the preamble, and a body for each of ``messages``."""
    return [m.PREAMBLE, *map(_encoder.encode, messages)]


def split(frames: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
    """The frames of each question of a batch; anything else as it is, for ``decode_question``."""
    if not 2 < len(frames) <= 1 + m.MAX_BATCH or frames[0] != m.PREAMBLE:
        return [frames]
    return [(m.PREAMBLE, body) for body in frames[1:]]


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: Sequence[bytes]) -> _T:
    if len(frames) != 2 or not frames[0].startswith(m.MAGIC):
        raise WireError("not a message of lmcache_redis: expected a preamble and a body")
    if frames[0] != m.PREAMBLE:
        theirs = int.from_bytes(frames[0][len(m.MAGIC) : len(m.PREAMBLE)], "big")
        raise VersionMismatch(
            f"the peer uses protocol version {theirs}, this side {m.PROTOCOL_VERSION}: "
            "install the same lmcache-redis for vLLM and for the agent"
        )
    if len(frames[1]) > m.MAX_MESSAGE_BYTES:
        raise WireError(
            f"a message has {len(frames[1])} bytes, at most {m.MAX_MESSAGE_BYTES} are taken"
        )
    try:
        return decoder.decode(frames[1])
    except _NOT_DECODED as error:
        raise WireError(f"cannot decode a message: {error}") from error


# The message in a preamble and a body. Both raise ``WireError``, ``VersionMismatch``.
decode_question = partial(_decode, _question_decoder)
decode_answer = partial(_decode, _answer_decoder)


def call_id_of(frames: Sequence[bytes]) -> int:
    """The ``call_id`` of a message that cannot be decoded; 0 if it has none."""
    try:
        return _envelope_decoder.decode(frames[1]).call_id
    except (*_NOT_DECODED, IndexError):
        return 0


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A ROUTER bound to ``endpoint``. Raises ``ConfigError`` if it cannot be bound.

    Raises ``ZMQError`` if descriptors are short.
    """
    path = endpoint_path(endpoint)
    for each in (path, hidden_path(path)):
        _clear_stale_socket(each, endpoint)
    router = _bounded_socket(context, zmq.ROUTER, _INBOX)
    # A client may reconnect under its identity before the ROUTER notices the loss of its old
    # connection.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close()
        if error.errno == zmq.EADDRINUSE:
            raise _in_use(endpoint) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # another endpoint would not help
        raise ConfigError(f"cannot listen on --endpoint {endpoint}: {error.strerror}") from error
    return router


def hidden_path(path: Path) -> Path:
    """Where the socket is while the agent accepts no new engines."""
    return path.with_name(f"{path.name}.full")


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


def why_untrusted(endpoint: str) -> str | None:
    """Why there may be a listener of other users, to whom an engine would open its memory; or why
    this user cannot reach the agent."""
    directory = endpoint_path(endpoint).parent
    try:
        why = why_unsafe(directory)
        if why is None and not os.access(directory, os.X_OK, effective_ids=True):
            raise PermissionError
        return why
    except PermissionError:
        return f"{directory} may not be entered by this user: run engine and agent as one user"
    except OSError:
        return None  # no directory, so no listener


def _bounded_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, inbox: int
) -> zmq.Socket[bytes]:
    found = context.socket(kind)
    # Unless it is closed with a time, it does not wait for peers to read.
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.SNDHWM, _OUTBOX)
    found.setsockopt(zmq.RCVHWM, inbox)
    found.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)
    return found


def _clear_stale_socket(path: Path, endpoint: str) -> None:
    """Removes a socket without a listener. Raises ``ConfigError`` if anything else is there."""
    if not path.exists():
        return
    why = "is not a socket"
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
                return
            except OSError as error:
                why = f"exists ({error.strerror})"
            else:
                raise _in_use(endpoint)
    raise ConfigError(f"--endpoint {endpoint} cannot be used: {path} {why}; choose another one")


def _in_use(endpoint: str) -> StartError:
    return StartError(
        f"the endpoint {endpoint} is in use: another agent runs on this node; "
        "stop it or choose another --endpoint"
    )


class Wakeup:
    """Lets any thread wake a thread that polls ``fd``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a signal handler may call `set` while this thread is inside it.
        self._lock = threading.RLock()

    def set(self) -> None:
        """Makes ``fd`` readable. Harmless after ``close``."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Makes ``fd`` unreadable until the next ``set``."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1


class AgentSocket:
    """A DEALER with its monitor. One thread uses it; any may call ``wake``.

    sent_s: when it last sent, or tried to, of `time.monotonic()`.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.sent_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup()
        self._opened: list[zmq.Socket[bytes]] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Ends `wait` at once. From any thread, also after `close`."""
        self._wakeup.set()

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        """Waits for something to come, or `wake`; whether messages are there, and events."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        return self._socket in ready, self._monitor in ready

    def send(self, frames: list[bytes]) -> bool:
        """Sends a message; False if there is no agent, or it does not read."""
        self.sent_s = time.monotonic()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self) -> Iterator[list[bytes]]:
        """The messages that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv_multipart(zmq.NOBLOCK)

    def connected(self) -> bool:
        """The next event: whether the agent is there now."""
        event: int = recv_monitor_message(self._monitor)["event"]
        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def reopen(self, linger_s: float = 0.0) -> None:
        """Another socket in its place. linger_s: how long what was sent last may take.

        If it raises, it may be called again.
        """
        self._close(linger_s)
        self._open()

    def close(self, linger_s: float = 0.0) -> None:
        self._close(linger_s)
        self._context.term()
        self._wakeup.close()

    def _open(self) -> None:
        self._socket = dealer = _bounded_socket(self._context, zmq.DEALER, _OUTBOX)
        self._opened.append(dealer)
        # A restarted agent is found within 100 ms.
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        # No messages are queued for an absent agent: they would be stale when it starts.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        # Before it connects, so that no event is missed.
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = dealer.get_monitor_socket(events)
        self._opened.append(self._monitor)
        self._poller = zmq.Poller()
        for source in (dealer, self._monitor, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)
        try:
            dealer.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{self.endpoint!r} is not an agent's endpoint: use ipc://PATH"
            ) from error

    def _close(self, linger_s: float) -> None:
        # The monitor is ended before its reader is closed. Without a reader, libzmq's thread waits
        # for ever to send an event. It holds a lock then, which `disable_monitor` needs, and that
        # waits with the GIL: the whole process would stop.
        with contextlib.suppress(zmq.ZMQError):  # it may have failed
            if self._opened:
                self._opened[0].disable_monitor()
        while self._opened:
            self._opened.pop().close(linger=int(linger_s * 1000))
