# SPDX-License-Identifier: Apache-2.0
"""Handles of memory: on the wire, whether their process is there, and those that are malformed."""

from __future__ import annotations

import msgspec
import pytest

from lmcache_redis.device import driver
from lmcache_redis.device.handles import (
    CudaFdHandle,
    CudaHandle,
    CudaIPCHandle,
    SharedMemoryHandle,
    check_exporter,
    own_process,
)
from lmcache_redis.device.mapping import check_handle
from lmcache_redis.errors import DeviceError
from tests import cuda_driver
from tests.device.gpu_calls import changed, unpinned_gpus

SHARED = SharedMemoryHandle(1, 2, 3, 4, 5, 6)
WHOLE = CudaIPCHandle(1, 2, "GPU", bytes(64), 100, 20, 80)
PIECES = CudaFdHandle(1, 2, "GPU", (3, 4), 50, 20, 80)


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


def test_a_range_within_its_allocation() -> None:
    for handle in (WHOLE, PIECES):
        check_handle(handle)
        check_handle(changed(handle, offset_bytes=0, size_bytes=100))


@pytest.mark.parametrize(
    "handle",
    [
        changed(WHOLE, memory_handle=bytes(63)),
        changed(WHOLE, allocation_bytes=0),
        changed(WHOLE, allocation_bytes=2**62 + 1),
        changed(WHOLE, allocation_bytes=99),
        changed(WHOLE, offset_bytes=21),
        changed(WHOLE, offset_bytes=-1),
        changed(WHOLE, size_bytes=0),
        changed(WHOLE, size_bytes=-1),
        changed(WHOLE, size_bytes=2**63),
        changed(PIECES, fds=()),
        changed(PIECES, fds=(-1, 3)),
        changed(PIECES, fds=(2**31, 3)),
        changed(PIECES, fds=(3,)),
        changed(PIECES, fds=(3,) * 65_537),
        changed(PIECES, piece_bytes=0),
        changed(PIECES, piece_bytes=-50),
        changed(PIECES, piece_bytes=2**62 + 1),
        changed(PIECES, offset_bytes=21),
    ],
)
def test_a_malformed_handle_is_refused(handle: CudaHandle) -> None:
    with pytest.raises(DeviceError, match=r"GPU memory|IPC handle"):
        check_handle(handle)


@pytest.mark.skipif(bool(cuda_driver.missing()), reason=str(cuda_driver.missing()))
def test_a_gpu_that_is_not_visible() -> None:
    cuda_driver.reset()
    cuda_driver.set("devices", 2)
    visible = driver.device_uuids()
    assert unpinned_gpus().at(visible[1]).ordinal == 1
    with pytest.raises(DeviceError, match=f"GPU-x is not visible.*{visible[0]}, {visible[1]}"):
        unpinned_gpus().at("GPU-x")
    cuda_driver.reset()
