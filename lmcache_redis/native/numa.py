# SPDX-License-Identifier: Apache-2.0
"""Spreading memory over the NUMA nodes of a machine, so that no node's bandwidth is the limit.

On a machine with two sockets, each socket has its own GPUs and network cards. Memory that all of
them use, if faulted in by one thread, would lie on that thread's node, and half of all copies would
cross the link between the sockets. A policy that the process already has (numactl) is kept, and
nodes that it may not use (cpuset) are left out.

Source: mbind(2), get_mempolicy(2); Documentation/admin-guide/mm/numa_memory_policy.rst of Linux.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

# No other machine has a system call of the number -1.
_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_MBIND, _GET_MEMPOLICY = _NUMBERS.get(os.uname().machine, (-1, -1))
_MPOL_DEFAULT = 0
_MPOL_INTERLEAVE = 3
_MOST_NODES = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")
_STATUS = Path("/proc/self/status")
_ALLOWED = re.compile(r"^Mems_allowed_list:\s*(\S+)$", re.MULTILINE)

_libc = ctypes.CDLL(None, use_errno=True)


def spread(address: int, nbytes: int) -> tuple[int, ...]:
    """Interleave the pages of a page-aligned range, not faulted in yet, over all usable nodes.

    Returns these nodes. Empty if nothing was done: there is only one node, the process has a policy
    of its own, or the kernel has no NUMA support.
    """
    nodes = usable_nodes()
    if len(nodes) < 2 or not _has_default_policy() or not interleave(address, nbytes, nodes):
        return ()
    return nodes


def usable_nodes() -> tuple[int, ...]:
    """The nodes whose memory this process may use."""
    try:
        with_memory = parse_nodes(_WITH_MEMORY.read_text())
        allowed = _ALLOWED.search(_STATUS.read_text())
    except (OSError, ValueError):
        return ()
    if allowed is None:
        return with_memory
    return tuple(sorted({*with_memory} & {*parse_nodes(allowed.group(1))}))


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parse a node list of the kernel, such as ``0-3,8``. Raises ValueError if malformed."""
    nodes: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    if max(nodes, default=0) >= _MOST_NODES:
        raise ValueError(f"nodes are below {_MOST_NODES}, not {text!r}")
    return tuple(sorted(nodes))


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Set MPOL_INTERLEAVE for a page-aligned range; False if the kernel refuses."""
    words = (ctypes.c_ulong * (_MOST_NODES // _WORD_BITS))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel subtracts one from the number of bits.
    arguments = (address, nbytes, _MPOL_INTERLEAVE, ctypes.addressof(words), _MOST_NODES + 1, 0)
    return _syscall(_MBIND, *arguments) == 0


def _has_default_policy() -> bool:
    mode = ctypes.c_int(-1)
    failed = _syscall(_GET_MEMPOLICY, ctypes.addressof(mode), 0, 0, 0, 0)
    return not failed and mode.value == _MPOL_DEFAULT


def _syscall(number: int, *arguments: int) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
