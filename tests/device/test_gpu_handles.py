# SPDX-License-Identifier: Apache-2.0
"""Handles of GPU memory as they arrive: malformed ones are refused before they are opened."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_redis.device import driver
from lmcache_redis.device.handles import CudaFdHandle, CudaHandle, CudaIPCHandle
from lmcache_redis.device.mapping import check_handle
from lmcache_redis.errors import DeviceError
from tests import cuda_driver
from tests.device.gpu_calls import unpinned_gpus

WHOLE = CudaIPCHandle(1, 2, "GPU", bytes(64), 100, 20, 80)
PIECES = CudaFdHandle(1, 2, "GPU", (3, 4), 50, 20, 80)


def changed(handle: CudaHandle, **changes: Any) -> CudaHandle:
    return msgspec.structs.replace(handle, **changes)


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
