"""Everything that the demo started ends with it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 2.0
_POLL_S = 0.02


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, and no process that began in it outlives it.

    An engine is a tree of processes whose root may go first. Linux gives those that are left to
    this process (PR_SET_CHILD_SUBREAPER, prctl(2)), so that they can be found and ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours_before = _children()

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end_children(spared=ours_before)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end_children(spared: set[int]) -> None:
    """Children get a moment to end by themselves; then they, and what they leave, are killed."""
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
    """Processes whose parent this process is, ended ones that were not waited for included."""
    children = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # pid (name) state parent ...; the name may hold anything, parentheses too.
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                children.add(int(entry.name))
    return children
