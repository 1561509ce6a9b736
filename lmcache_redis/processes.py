# SPDX-License-Identifier: Apache-2.0
"""Processes as ``/proc`` (Linux) shows them, how to end one, and the limits of this one.

A process is identified by its id and its start time, because the kernel reuses ids. A process in
another PID namespace is invisible.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The kernel keeps this much of a thread's name.
_KERNEL_NAME_BYTES = 15


class NamedThread(threading.Thread):
    """A daemon thread. The kernel has its name too, for `top -H`, perf and py-spy."""

    def __init__(
        self, name: str, target: Callable[..., object] | None = None, args: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)

    def run(self) -> None:
        name_in_kernel(self.name)
        super().run()


def name_in_kernel(name: str) -> None:
    """Name the calling thread in ``/proc/PID/task/TID/comm``; nothing happens where that is not.

    Python does so itself from 3.14 on.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(_kernel_name(name))


def _kernel_name(name: str) -> str:
    """lmcr-get-0, disk-write-3, scatter-regis-1: what tells threads apart stays."""
    short = name.replace("lmcache-redis-", "lmcr-")
    if len(short) > _KERNEL_NAME_BYTES:
        short = short.removeprefix("lmcr-")
    head, dash, number = short.rpartition("-")
    if len(short) > _KERNEL_NAME_BYTES and number.isdigit():
        short = head[: _KERNEL_NAME_BYTES - len(dash + number)] + dash + number
    return short[:_KERNEL_NAME_BYTES]


def process_start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot: field 22 of ``/proc/PID/stat``; None if unreadable."""
    try:
        return int(stat_of(pid)[19])
    except OSError:
        return None


def is_running(pid: int, start_time: int) -> bool:
    """Whether exactly this process exists. A zombie has released its memory, and does not count.

    False also if ``/proc`` cannot be read.
    """
    return _runs(pid, start_time) is True


def has_ended(pid: int, start_time: int) -> bool:
    """Whether exactly this process is known to have ended.

    False if ``/proc`` cannot be read for any other reason, such as too many open files.
    """
    return _runs(pid, start_time) is False


def check_not_forked(what: str, pid: int) -> None:
    """Raises RuntimeError if this process is not ``pid``, which made it, but a fork of that."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"{what} was made before a fork, and its threads are in the parent process: "
            "make one in each process"
        )


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, then SIGKILL if the process has not ended after ``grace_s`` seconds."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended_how(returncode: int) -> str:
    """A return code of `subprocess.Popen` in words: an exit status or a signal's name."""
    if returncode >= 0:
        return f"exit status {returncode}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"


def memory_limit_bytes(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """The memory that this process may use: the machine's, or a limit of its control groups.

    A group is limited by its parents too. A container sees its own group at the mount point, and
    may not see the path that ``/proc`` gives.
    Source: proc_pid_cgroup(5), and ``memory.max`` and ``memory.limit_in_bytes`` in cgroups(7).
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                root, name = mount, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = mount / "memory", "memory.limit_in_bytes"
            else:
                continue
            inner = Path(path.lstrip("/"))
            for group in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
                    limits.append(int((root / group / name).read_text()))
    return min(limits)


def _runs(pid: int, start_time: int) -> bool | None:
    try:
        stat = stat_of(pid)
        if int(stat[19]) != start_time:
            return False
        # A zombie may have threads, and with them its memory: one in a call of a driver that cannot
        # be interrupted outlives SIGKILL.
        return _is_alive(stat) or any(map(_is_alive, _threads_of(pid)))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None


def _is_alive(stat: list[bytes]) -> bool:
    return stat[0] not in (b"Z", b"X")


def _threads_of(pid: int) -> Iterator[list[bytes]]:
    for thread in os.listdir(f"/proc/{int(pid)}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            yield stat_of(pid, int(thread))


def stat_of(pid: int, thread: int | None = None) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from field 3 (state, parent, ...) on. Raises OSError.

    thread: the fields of one thread of the process.
    """
    within = "" if thread is None else f"task/{thread}/"
    with open(f"/proc/{int(pid)}/{within}stat", "rb") as stat:
        # Field 2 is the command in parentheses, which may itself hold spaces and parentheses.
        return stat.read().rpartition(b")")[2].split()


def raise_descriptor_limit() -> None:
    """Lets this process have as many open files as it may: the soft limit becomes the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_descriptors() -> int:
    """How many files this process may still open; 0 if it cannot even count them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # without that of the list
    except OSError:
        return 0
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - used)
