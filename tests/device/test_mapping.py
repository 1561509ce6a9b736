# SPDX-License-Identifier: Apache-2.0
"""What is mapped and what is not, and memory that its owner takes away again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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


@contextmanager
def opened(path: Path | None = None, flags: int = 0) -> Iterator[int]:
    """A descriptor of a file, or of new memory."""
    fd = os.open(path, os.O_RDWR) if path else os.memfd_create("test", flags)
    try:
        if not path:
            os.ftruncate(fd, SIZE)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def memory() -> Iterator[int]:
    """As torch makes it: it takes no seals."""
    with opened() as fd:
        yield fd


@pytest.fixture
def mapping(memory: int) -> Iterator[SharedMapping]:
    with closing(SharedMapping(handle_of(memory))) as mapping:
        yield mapping


def test_a_file_or_a_device_is_not_memory(tmp_path: Path) -> None:
    """It would be written to."""
    here = Path(__file__).with_suffix(".bin") if _is_tmpfs(tmp_path) else tmp_path / "file"
    here.write_bytes(bytes(SIZE))
    for path in (here, Path("/dev/null")):
        with (
            opened(path) as fd,
            pytest.raises(DeviceError, match="not shared memory: only /dev/shm and memfds"),
        ):
            SharedMapping(handle_of(fd))
    here.unlink()


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
    try:
        with opened(path) as fd:
            SharedMapping(handle_of(fd)).close()
    finally:
        path.unlink()


def test_memory_that_takes_seals_cannot_shrink_any_more() -> None:
    with (
        opened(flags=os.MFD_ALLOW_SEALING) as fd,
        closing(SharedMapping(handle_of(fd))),
        pytest.raises(PermissionError),
    ):
        os.ftruncate(fd, SIZE - 4096)


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
    with opened() as other, closing(SharedMapping(handle_of(other))) as second:
        os.ftruncate(memory, 0)
        assert mapping.memory[0] == 0
        second.check()
        second.memory[0] = 7
        assert os.pread(other, 1, 0) == b"\x07"


def _is_tmpfs(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [m for m in mounts if path.is_relative_to(m[1])]
    return max(holding, key=lambda m: len(m[1]))[2] == "tmpfs"
