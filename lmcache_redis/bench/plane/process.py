"""A worker from outside: asked, waited for until a deadline, and ended whatever its state."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from types import TracebackType

import msgspec

from lmcache_redis.bench.plane.messages import Measured, Request
from lmcache_redis.errors import LMCacheRedisError

ANSWER_WITHIN_S = 60.0
_END_WITHIN_S = 5.0


class WorkerFailed(LMCacheRedisError):
    """The worker's client failed or hung; the message says how."""


class WorkerProcess:
    """One client in a process of its own. A context manager: started on entry, ended on exit."""

    def __init__(self, client: str, url: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self.client = client
        self._url = url
        self._answer_within_s = answer_within_s
        self._decoder = msgspec.json.Decoder(Measured)
        self._closed = False

    def start(self) -> WorkerProcess:
        """Starts it; nothing is connected before the first request."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._channel, theirs = socket.socketpair()
        self.answer_within(self._answer_within_s)
        with theirs:
            words = [self.client, self._url, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache_redis.bench.plane.worker", *words],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
            )
        self._stream = self._channel.makefile("rwb")
        return self

    def answer_within(self, seconds: float) -> None:
        """How long later answers may take."""
        self._answer_within_s = seconds
        self._channel.settimeout(seconds)

    def ask(self, request: Request) -> Measured:
        """Raises WorkerFailed where it ends or does not answer in time; close it then."""
        try:
            self._stream.write(msgspec.json.encode(request) + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        except TimeoutError:
            raise WorkerFailed(f"no answer within {self._answer_within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise WorkerFailed(self._last_words())
        return self._decoder.decode(line)

    def close(self) -> None:
        """Ends it: a closed socket tells it to, else SIGKILL. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thing in (self._stream, self._channel, self._log):
            # A request that could not be sent is still in the stream.
            with contextlib.suppress(OSError):
                thing.close()

    def _last_words(self) -> str:
        try:
            status = self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {status}"

    def __enter__(self) -> WorkerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
