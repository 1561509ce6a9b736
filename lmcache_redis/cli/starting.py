# SPDX-License-Identifier: Apache-2.0
"""Restarts a command once in the environment that it needs.

Every user of the machine could read a password in `--redis-url` in the process list. So the URL
moves into the environment, which only this user can read.

The agent copies pages of about a megabyte that are not read again soon. By default glibc bypasses
the caches only for copies larger than three quarters of the last-level cache; for smaller copies
the CPU reads each line of the target before it overwrites it. With the threshold at 256 KiB two
threads copy 256 MiB in 14.4 ms instead of 24.9 (an Intel Xeon at 2.3 GHz, Emerald Rapids). glibc
reads the threshold when a process starts:
https://sourceware.org/glibc/manual/latest/html_node/Hardware-Capability-Tunables.html
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence

URL_VARIABLE = "LMCACHE_REDIS_URL"
URL_OPTION = "--redis-url"
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
THRESHOLD_SETTING = f"{_THRESHOLD}={256 << 10:#x}"


def start_again_if_needed(command: str) -> None:
    """Replaces this process, once, by one with the right environment; the process id stays."""
    words, environment = without_secrets(sys.orig_argv[1:])
    before = os.environ.get(TUNABLES_VARIABLE, "")
    if command == "agent" and applies() and _THRESHOLD not in before:
        environment[TUNABLES_VARIABLE] = ":".join(filter(None, (before, THRESHOLD_SETTING)))
    if not environment:
        return
    try:
        os.execve(sys.executable, [sys.executable, *words], {**os.environ, **environment})
    except OSError:
        return  # the command runs as it was started


def without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line without a URL that may contain a password, and that URL as a variable."""
    kept: list[str] = []
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != URL_OPTION:
            kept.append(word)
            continue
        url = value if equals else next(rest, None)
        if url is not None and ("@" in url or "password" in url):
            found[URL_VARIABLE] = url
        else:
            kept += [word] if equals or url is None else [word, url]
    return kept, found


def applies() -> bool:
    """Whether the C library has the threshold: glibc on x86."""
    return platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"
