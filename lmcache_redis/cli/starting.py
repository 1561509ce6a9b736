"""What a command sets up in its process before it starts.

A password in `--redis-url` would be visible in the process list to every user of the machine: the
URL moves into the environment, which only this user can read.

The agent copies pages of about a megabyte that are not read again soon. glibc bypasses the
caches only for copies larger than three quarters of the last-level cache; for smaller ones each
line of the target is read before it is overwritten. With the threshold at 256 KiB two threads
copy 256 MiB in 14 ms instead of 25 (docs/performance.md). glibc reads it at the start of a
process:
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
    if command == "agent":
        environment |= _tuned(os.environ.get(TUNABLES_VARIABLE, ""))
    if not environment:
        return
    try:
        os.execve(sys.executable, [sys.executable, *words], {**os.environ, **environment})
    except OSError:
        return  # copies are slower, and the command line stays as it is


def without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line without a URL that may hold a password, and the URL as a variable."""
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


def _tuned(before: str) -> dict[str, str]:
    """The variable with the setting, unless the variable already contains it."""
    if _THRESHOLD in before or not applies():
        return {}
    return {TUNABLES_VARIABLE: ":".join(filter(None, (before, THRESHOLD_SETTING)))}


def applies() -> bool:
    """Whether the C library has the setting: glibc on x86."""
    return platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"
