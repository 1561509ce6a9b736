# SPDX-License-Identifier: Apache-2.0
"""Memory on several NUMA nodes: parsing anywhere, system calls on this machine's nodes."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_redis.cache.arena import Arena
from lmcache_redis.native import numa
from lmcache_redis.native.madvise import address_of

NODES = Path("/sys/devices/system/node/has_memory")


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", (0,)), ("0-3", (0, 1, 2, 3)), ("0,2-3,8", (0, 2, 3, 8)), ("", ()), ("\n", ())],
)
def test_lists_of_the_kernel(text: str, nodes: tuple[int, ...]) -> None:
    assert numa.parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["a", "0-5000", "-1", "0 1"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"nodes|invalid literal"):
        numa.parse_nodes(text)


@pytest.mark.skipif(not NODES.exists(), reason="a kernel without NUMA")
def test_usable_nodes_are_those_of_this_machine() -> None:
    usable = numa.usable_nodes()
    assert usable
    assert {*usable} <= {*numa.parse_nodes(NODES.read_text())}


def test_only_nodes_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, status = tmp_path / "has_memory", tmp_path / "status"
    memory.write_text("0-3\n")
    status.write_text("Name:\tagent\nMems_allowed:\tff\nMems_allowed_list:\t1-2,5\nThreads:\t1\n")
    monkeypatch.setattr(numa, "_WITH_MEMORY", memory)
    monkeypatch.setattr(numa, "_STATUS", status)
    assert numa.usable_nodes() == (1, 2)
    memory.unlink()
    assert numa.usable_nodes() == ()


def policy_of(address: int) -> str:
    """The kernel's line for the mapping of an address; an anonymous mapping may be split."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return line.split()[1]
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_the_kernel_takes_the_policy() -> None:
    nodes = numa.usable_nodes()
    mapped = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(mapped)
    assert numa.interleave(address, 1 << 20, nodes)
    assert policy_of(address).startswith("interleave")
    assert not numa.interleave(address, 1 << 20, [1023]), "a node that is not there"
    assert not numa.interleave(address + 1, 4096, nodes), "not the beginning of a page"


def test_one_node_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "usable_nodes", lambda: (0,))
    monkeypatch.setattr(numa, "interleave", lambda *_: pytest.fail("nothing was to be done"))
    arena = Arena(1 << 20, 4096)
    assert arena.numa_nodes == ()
    arena.close()


def test_an_arena_asks_for_all_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, tuple[int, ...]]] = []

    def interleave(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
        asked.append((address, nbytes, nodes))
        return True

    monkeypatch.setattr(numa, "usable_nodes", lambda: (0, 1))
    monkeypatch.setattr(numa, "interleave", interleave)
    arena = Arena(10 << 20, 4096)
    assert arena.numa_nodes == (0, 1)
    assert asked == [(arena.base_address, arena.size_bytes, (0, 1))]
    arena.close()


@pytest.mark.servers
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no number known")
def test_a_policy_of_the_process_stays() -> None:
    """As set by numactl: set_mempolicy(MPOL_INTERLEAVE) before the pool is created."""
    code = """
import ctypes, os
from lmcache_redis.native import numa
number = {"x86_64": 238, "aarch64": 237}[os.uname().machine]
mask = ctypes.c_ulong(1)
assert numa._has_default_policy()
assert numa._syscall(number, 3, ctypes.addressof(mask), 65) == 0
assert not numa._has_default_policy()
numa.usable_nodes = lambda: (0, 1)
numa.interleave = lambda *_: 1 / 0
assert numa.spread(0, 4096) == ()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if re.search(r"assert numa\._has_default_policy\(\)", done.stderr):
        pytest.skip("the tests themselves run under a policy")
    assert done.returncode == 0, done.stderr
