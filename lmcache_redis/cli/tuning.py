"""Starting the agent under the C library's setting for large copies.

The agent copies pages of a megabyte that nobody reads again soon. glibc streams a copy past
the caches only from three quarters of the last-level cache on; below that each line of the
target is read before it is overwritten. With the threshold at 256 KiB two threads copy
256 MiB in 14 ms instead of 25 (docs/performance.md). It is read at the start of a process
and cannot be changed later:
https://sourceware.org/glibc/manual/latest/html_node/Hardware-Capability-Tunables.html
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
_NAME = "glibc.cpu.x86_non_temporal_threshold"
SETTING = f"{_NAME}={256 << 10:#x}"


def start_tuned() -> None:
    """Replaces this process by itself, once, with the setting; the process id stays.

    Does nothing where the setting is there already, be it somebody else's, and where there
    is no glibc or another processor.
    """
    before = os.environ.get(VARIABLE, "")
    if _NAME in before or not _applies():
        return
    after = ":".join(filter(None, (before, SETTING)))
    try:
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: after}
        )
    except OSError:
        return  # slower copies, no more


def _applies() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"
