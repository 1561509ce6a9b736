# SPDX-License-Identifier: Apache-2.0
"""What is mapped and what is not, and memory that its owner takes away again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache_redis import native
from lmcache_redis.device.cpu import SharedMapping
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import process_start_time

SIZE = 1 << 16
guarded = pytest.mark.skipif(native.guard is None, reason="the native extension is missing")


def handle_of(fd: int, size_bytes: int = SIZE) -> SharedMemoryHandle:
    found, pid = os.fstat(fd), os.getpid()
    start = process_start_time(pid)
    return SharedMemoryHandle(pid, start, fd, found.st_dev, found.st_ino, size_bytes)


@pytest.fixture
def memory() -> Iterator[int]:
    """As torch makes it: it takes no seals."""
    fd = os.memfd_create("test", 0)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def mapping(memory: int) -> Iterator[SharedMapping]:
    mapping = SharedMapping(handle_of(memory))
    yield mapping
    mapping.close()


def test_a_file_is_not_memory(tmp_path: Path) -> None:
    """It would be written to."""
    here = Path(__file__).with_suffix(".bin") if _is_tmpfs(tmp_path) else tmp_path / "file"
    here.write_bytes(bytes(SIZE))
    fd = os.open(here, os.O_RDWR)
    try:
        with pytest.raises(DeviceError, match="not shared memory: only /dev/shm and memfds"):
            SharedMapping(handle_of(fd))
    finally:
        os.close(fd)
        here.unlink()


def test_a_device_is_not_memory() -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(DeviceError, match="not shared memory"):
            SharedMapping(handle_of(fd))
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives memory away")
def test_memory_of_another_user_is_refused(memory: int) -> None:
    os.fchown(memory, 65534, -1)
    with pytest.raises(DeviceError, match="belongs to user 65534"):
        SharedMapping(handle_of(memory))


@pytest.mark.parametrize("size_bytes", [0, -1, SIZE + 1, 2**63 - 1])
def test_a_size_that_is_none(memory: int, size_bytes: int) -> None:
    before = Path("/proc/self/maps").read_text().count("memfd:test")
    with pytest.raises(DeviceError, match=f"has {SIZE} bytes"):
        SharedMapping(handle_of(memory, size_bytes))
    assert Path("/proc/self/maps").read_text().count("memfd:test") == before


def test_a_name_in_dev_shm_is_memory() -> None:
    path = Path(f"/dev/shm/lmcache-redis-test-{os.getpid()}")
    path.write_bytes(bytes(SIZE))
    fd = os.open(path, os.O_RDWR)
    try:
        SharedMapping(handle_of(fd)).close()
    finally:
        os.close(fd)
        path.unlink()


def test_memory_that_takes_seals_cannot_shrink_any_more() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    mapping = SharedMapping(handle_of(fd))
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, SIZE - 4096)
    finally:
        mapping.close()
        os.close(fd)


def test_memory_that_shrank_is_refused(memory: int, mapping: SharedMapping) -> None:
    mapping.check()
    os.ftruncate(memory, SIZE - 1)
    with pytest.raises(DeviceError, match="truncated"):
        mapping.check()


@guarded
@pytest.mark.parametrize(
    "access",
    [lambda array: array.copy(), lambda array: array.fill(1)],
    ids=["a read", "a write"],
)
def test_memory_that_shrinks_under_a_copy(
    memory: int, mapping: SharedMapping, access: Callable[[np.ndarray], object]
) -> None:
    array = np.frombuffer(mapping.memory, np.uint8)
    os.ftruncate(memory, 4096)
    access(array)  # without the guard, this kills the process
    os.ftruncate(memory, SIZE)
    with pytest.raises(DeviceError, match="truncated"):
        mapping.check()  # it has its old size again, but the copy is invalid
    del array
    assert os.pread(memory, SIZE, 4096) == bytes(SIZE - 4096), "fresh pages were written to"


@guarded
def test_another_mapping_is_not_concerned(memory: int, mapping: SharedMapping) -> None:
    other = os.memfd_create("test", 0)
    os.ftruncate(other, SIZE)
    second = SharedMapping(handle_of(other))
    try:
        os.ftruncate(memory, 0)
        assert mapping.memory[0] == 0
        second.check()
        second.memory[0] = 7
        assert os.pread(other, 1, 0) == b"\x07"
    finally:
        second.close()
        os.close(other)


@pytest.mark.servers
@guarded
@pytest.mark.parametrize("how", ["an access", "a signal"])
def test_any_other_sigbus_ends_the_process_as_before(how: str) -> None:
    code = """
import faulthandler, mmap, os, signal, sys
if "traceback" in sys.argv:
    faulthandler.enable()
from tests.device.test_mapping import SIZE, SharedMapping, handle_of
fd = os.memfd_create("guarded"); os.ftruncate(fd, SIZE)
mapping = SharedMapping(handle_of(fd))
os.ftruncate(fd, 0)
mapping.memory[0]
other = os.memfd_create("not guarded"); os.ftruncate(other, SIZE)
memory = mmap.mmap(other, SIZE)
os.ftruncate(other, 0)
print("here", flush=True)
if "signal" in sys.argv[1]:
    os.kill(os.getpid(), signal.SIGBUS)
else:
    memory[0]
print("not here")
"""
    for more in ([], ["traceback"]):
        done = subprocess.run(
            [sys.executable, "-c", code, how, *more], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "here\n", done.stderr
        assert done.returncode == -signal.SIGBUS
        assert ("Bus error" in done.stderr) is bool(more)


def _is_tmpfs(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [m for m in mounts if path.is_relative_to(m[1])]
    return max(holding, key=lambda m: len(m[1]))[2] == "tmpfs"
