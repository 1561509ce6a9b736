"""A worker from outside: asked, waited for until a deadline, and ended whatever its state."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile

import msgspec

from benchmarks import ROOT
from benchmarks.plane.messages import Measured, Request
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process

_ANSWER_WITHIN_S = 60.0
_END_WITHIN_S = 5.0


class WorkerFailed(LMCacheRedisError):
    """The worker's client failed or hung; the message says how."""


class WorkerProcess:
    """One client in a process of its own, connected by its first request. A context manager."""

    def __init__(self, client: str, url: str) -> None:
        self._decoder = msgspec.json.Decoder(Measured)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._channel, theirs = socket.socketpair()
        with theirs:
            words = [client, url, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plane.worker", *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
            )
        self._stream = self._channel.makefile("rwb")

    def ask(self, request: Request, within_s: float = _ANSWER_WITHIN_S) -> Measured:
        """Raises WorkerFailed where it ends or does not answer in time; close it then."""
        self._channel.settimeout(within_s)
        try:
            self._stream.write(msgspec.json.encode(request) + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        except TimeoutError:
            raise WorkerFailed(f"no answer within {within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise WorkerFailed(self._last_words())
        return self._decoder.decode(line)

    def close(self) -> None:
        """Ends it: a closed socket tells it to, else a signal. May be called again."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WITHIN_S)
        end_process(self._process, _END_WITHIN_S)
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
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
