# SPDX-License-Identifier: Apache-2.0
"""Handles on the wire, and whether their process is there."""

from __future__ import annotations

import msgspec
import pytest

from lmcache_redis.device.handles import (
    CudaFdHandle,
    CudaIPCHandle,
    SharedMemoryHandle,
    StorageHandle,
    check_exporter,
    own_process,
)
from lmcache_redis.errors import DeviceError

SHARED = SharedMemoryHandle(1, 2, 3, 4, 5, 6)
CUDA = CudaIPCHandle(
    pid=1,
    pid_start_time=2,
    device_uuid="d",
    memory_handle=bytes(64),
    allocation_bytes=4096,
    offset_bytes=0,
    size_bytes=8,
)
PIECES = CudaFdHandle(
    pid=1,
    pid_start_time=2,
    device_uuid="d",
    fds=(7, 9),
    piece_bytes=4096,
    offset_bytes=512,
    size_bytes=4096,
)


@pytest.mark.parametrize("handle", [SHARED, CUDA, PIECES])
def test_round_trip_in_a_union(handle: StorageHandle) -> None:
    encoded = msgspec.msgpack.encode(handle)
    assert msgspec.msgpack.decode(encoded, type=StorageHandle) == handle


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(SHARED) | {"more": 1}, SharedMemoryHandle)


class TestExporter:
    def test_this_process_is_its_own_exporter(self) -> None:
        pid, started = own_process()
        check_exporter(SharedMemoryHandle(pid, started, 0, 0, 0, 1))
        with pytest.raises(DeviceError, match="is not the engine that registered"):
            check_exporter(SharedMemoryHandle(pid, started + 1, 0, 0, 0, 1))

    def test_one_that_cannot_be_seen_names_the_namespace(self) -> None:
        no_pid = 2**22 + 1  # above the kernel's limit
        with pytest.raises(DeviceError, match="share one PID namespace"):
            check_exporter(SharedMemoryHandle(no_pid, 1, 0, 0, 0, 1))
