# SPDX-License-Identifier: Apache-2.0
"""The guard of mappings beside other handlers of SIGBUS, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lmcache_redis import native

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(native.guard is None, reason=native.why_not),
]

PREPARE = """
import ctypes, faulthandler, mmap, os, signal, threading
from lmcache_redis.native import guard

def mapped():
    fd = os.memfd_create("kv")
    os.ftruncate(fd, 1 << 16)
    memory = mmap.mmap(fd, 1 << 16)
    return fd, memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))

fd, memory, address = mapped()
other_fd, other, _ = mapped()
"""
CUT = """
assert not guard.is_lost(number)
os.ftruncate(fd, 0)
assert memory[5000] == 0
assert guard.is_lost(number)
"""
OTHER = """
os.ftruncate(other_fd, 0)
other[5000]
"""
SENT = "os.kill(os.getpid(), signal.SIGBUS)\n"
GUARD = "number = guard.add(address, 1 << 16)\n"
ENABLE = "faulthandler.enable()\n"
DISABLE = "faulthandler.disable()\n"


def run(*steps: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "".join((PREPARE, *steps, "print('alive')\n"))],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "steps",
    [
        (GUARD,),
        (ENABLE, GUARD),
        (GUARD, ENABLE),
        (GUARD, ENABLE, DISABLE),
        (ENABLE, GUARD, DISABLE),
        (ENABLE, GUARD, DISABLE, ENABLE),
        (GUARD, "signal.signal(signal.SIGBUS, signal.SIG_DFL)\n"),
    ],
)
def test_a_truncated_mapping_ends_no_process(steps: tuple[str, ...]) -> None:
    done = run(*steps, CUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


@pytest.mark.parametrize(
    ("steps", "reports"),
    [
        ((GUARD, CUT, OTHER), 0),
        ((GUARD, CUT, SENT), 0),
        ((ENABLE, GUARD, CUT, OTHER), 1),
        ((ENABLE, GUARD, CUT, SENT), 1),
        ((GUARD, ENABLE, CUT, OTHER), 1),
        ((GUARD, ENABLE, DISABLE, CUT, OTHER), 0),
        ((ENABLE, GUARD, DISABLE, ENABLE, CUT, OTHER), 1),
        # A disabled handler returns at once: the guard must not call it for ever.
        ((GUARD, ENABLE, CUT, DISABLE, OTHER), 0),
    ],
)
def test_another_bus_error_reaches_the_other_handlers(steps: tuple[str, ...], reports: int) -> None:
    """Once each, and then ends the process as without a guard."""
    done = run(*steps)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == ""
    assert done.stderr.count("Fatal Python error: Bus error") == reports


def test_a_signal_that_is_sent_reaches_a_handler_of_python() -> None:
    """And the guard is back afterwards."""
    handler = "signal.signal(signal.SIGBUS, lambda *words: print('heard'))\n"
    send = "signal.raise_signal(signal.SIGBUS)\n"
    done = run(handler, GUARD, send, CUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\nalive\n", "")
