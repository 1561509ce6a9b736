# SPDX-License-Identifier: Apache-2.0
"""No process outlives the command that started it, or what it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

from lmcache_redis.processes import stat_of

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 2.0
_POLL_S = 0.02


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """No process that is started in the block outlives it. SIGTERM ends the block as Ctrl-C does.

    The root of a process tree may end before the rest of the tree. Linux then makes this process
    the parent of the rest (PR_SET_CHILD_SUBREAPER, prctl(2)), so that it can be found and ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    children_before = _children()

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end_children(spared=children_before)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end_children(spared: set[int]) -> None:
    """Waits a moment for the children to end; then kills them and the children that they leave."""
    deadline_s = time.monotonic() + _GRACE_S
    while left := _children() - spared:
        for pid in left:
            if time.monotonic() > deadline_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> set[int]:
    """The processes whose parent this process is, zombies included."""
    children = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(stat_of(int(name))[1]) == os.getpid():
                children.add(int(name))
    return children
