"""Handles on the wire, and telling a process from a later one with its number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Union

import msgspec
import pytest

from lmcache_redis.device.handles import (
    CudaIPCHandle,
    SharedMemoryHandle,
    is_running,
    process_start_time,
)
from lmcache_redis.errors import DeviceError

SHARED = SharedMemoryHandle(1, 2, 3, 4, 5, 6)
CUDA = CudaIPCHandle(
    pid=1,
    pid_start_time=2,
    device_uuid="d",
    memory_handle=bytes(64),
    storage_size_bytes=8,
    storage_offset_bytes=0,
    ref_counter_handle=b"/torch_1_2_3",
    ref_counter_offset=0,
    dtype="uint8",
    shape=(8,),
    stride=(1,),
)
NO_PID = 2**22 + 1  # above the kernel's limit


@pytest.mark.parametrize("handle", [SHARED, CUDA])
def test_round_trip_in_a_union(handle: SharedMemoryHandle | CudaIPCHandle) -> None:
    either = Union[SharedMemoryHandle, CudaIPCHandle]  # noqa: UP007
    encoded = msgspec.msgpack.encode(handle)
    assert msgspec.msgpack.decode(encoded, type=either) == handle


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(SHARED) | {"more": 1}, SharedMemoryHandle)


class TestProcesses:
    def test_this_one(self) -> None:
        started = process_start_time(os.getpid())
        assert started > 0
        assert is_running(os.getpid(), started)
        assert not is_running(os.getpid(), started + 1)

    def test_a_name_with_parentheses_and_spaces(self) -> None:
        """Field 2 of the stat line is free text."""
        with open("/proc/thread-self/comm", "w") as comm:
            name = threading.current_thread().name
            comm.write("a) R (b 1 2")
        try:
            with open("/proc/self/stat", "rb") as stat:
                assert b"a) R (b 1 2" in stat.read()
            assert is_running(os.getpid(), process_start_time(os.getpid()))
        finally:
            with open("/proc/thread-self/comm", "w") as comm:
                comm.write(name)

    def test_none(self) -> None:
        with pytest.raises(DeviceError, match="PID namespace"):
            process_start_time(NO_PID)
        assert not is_running(NO_PID, 1)

    def test_a_zombie_is_not_running(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started = process_start_time(child.pid)
        assert is_running(child.pid, started)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet collected
        assert not is_running(child.pid, started)
        child.communicate()
        with pytest.raises(DeviceError):
            process_start_time(child.pid)
