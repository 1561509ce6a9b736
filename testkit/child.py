# SPDX-License-Identifier: Apache-2.0
"""A Python module in a process of its own: requests and answers are lines of JSON over a socket.

Each request has one answer. The process ends when our end of the socket is closed, and whatever it
has started ends with it: a vLLM that fails as it starts leaves its workers, which never end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

import msgspec

from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process

_GRACE_S = 5.0
_POLL_S = 0.02
_ROOT = str(Path(__file__).parent.parent)
_Self = TypeVar("_Self", bound="Child")


def _importable() -> str:
    """A PYTHONPATH that has this repository, whatever the working directory is."""
    return os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))


class Child:
    """Starts `python -m words... FD`, with FD its end of the socket. A context manager.

    log: receives the output of the process; `close` closes it. A failure quotes its last
    ``log_lines``. end_within_s: how long the process may take to end by itself.
    """

    failure: ClassVar[type[LMCacheRedisError]]
    log_lines = 1
    end_within_s = 5.0

    def __init__(self, words: list[str], log: IO[bytes], env: Mapping[str, str]) -> None:
        self._log = log
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = self._start(words, theirs.fileno(), env)
        except BaseException:
            self._channel.close()
            log.close()
            raise
        self._stream = self._channel.makefile("rwb")

    def _start(self, words: list[str], fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *words, str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(fd,),
            start_new_session=True,
            env=os.environ | env | {"PYTHONPATH": _importable()},
        )

    def _send(self, request: object) -> None:
        """Sends a request. Raises ``failure`` if the process has ended."""
        try:
            self._stream.write(msgspec.json.encode(request) + b"\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            raise self._ended() from None

    def _receive(self, kind: Any = Any, within_s: float | None = None) -> Any:
        """The next answer. Raises ``failure`` if the process has ended or takes longer."""
        self._channel.settimeout(within_s)
        try:
            line = self._stream.readline()
        except TimeoutError:
            raise self._failed(f"no answer within {within_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise self._ended()
        return msgspec.json.decode(line, type=kind)

    def _ended(self) -> LMCacheRedisError:
        # The log is complete when the process has ended, a moment after its socket is closed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        return self._failed("the process has ended")

    def _failed(self, how: str) -> LMCacheRedisError:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return self.failure("\n".join([f"{how}; its log ends with:", *lines[-self.log_lines :]]))

    def close(self) -> None:
        """Ends the process, whatever its state. May be called again."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.end_within_s)
        end_process(self.process, _GRACE_S)
        self._end_group()
        for each in (self._stream, self._channel, self._log):
            # The stream may hold a request that could not be sent.
            with contextlib.suppress(OSError):
                each.close()

    def _end_group(self) -> None:
        """Waits a moment for the others of the process's group to end; then kills them."""
        group, until_s = self.process.pid, time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError):  # there are none
            while time.monotonic() < until_s:
                with contextlib.suppress(ChildProcessError):  # ours only below `ended_in_order`
                    os.waitpid(-group, os.WNOHANG)
                os.killpg(group, 0)
                time.sleep(_POLL_S)
            os.killpg(group, signal.SIGKILL)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
