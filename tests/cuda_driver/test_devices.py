# SPDX-License-Identifier: Apache-2.0
"""GPUs, errors on demand, and what a process sees of them."""

from __future__ import annotations

import os
import traceback
import warnings

import pytest

from lmcache_redis.device import driver
from lmcache_redis.errors import GpuLost
from tests import cuda_driver
from tests.cuda_driver import more
from tests.cuda_driver.buffers import PAGE, in_thread, pinned, refused
from tests.servers import wait_until

SECOND = "22222222-2222-2222-2222-222222222222"
FIRST, THIRD = SECOND.replace("2", "1"), SECOND.replace("2", "3")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [FIRST, SECOND, THIRD]),
        ("2,0", [THIRD, FIRST]),
        (f"GPU-{SECOND}", [SECOND]),
        ("1,7,0", [SECOND]),
        ("", []),
        ("-1", []),
        ("MIG-2", []),
    ],
)
def test_visible_devices_are_chosen(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]
) -> None:
    cuda_driver.set("devices", 3)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if seen:
        assert driver.device_uuids() == seen
    else:
        with refused(100):
            driver.device_uuids()


def test_a_device_is_no_ordinal() -> None:
    cuda_driver.set("devices", 2)
    cuda_driver.set("first_device", 7)
    assert driver.device_uuids() == [FIRST, SECOND]
    assert driver.device_name(1) == "Stub GPU"
    assert driver.device_attribute(driver.Attribute.COMPUTE_MODE, 1) == 0
    driver.set_context(driver.retain_context(1))
    assert more.current_device() == 8
    driver.release_context(1)
    with refused(101):
        driver._device_attribute(driver.Attribute.COMPUTE_MODE, 1)


def test_memory_belongs_to_the_gpu_of_the_context() -> None:
    cuda_driver.set("devices", 2)
    contexts = [driver.retain_context(ordinal) for ordinal in range(2)]
    driver.set_context(contexts[1])
    assert more.current_device() == 1
    driver.allocate(PAGE)
    free = []
    for context in contexts:
        driver.set_context(context)
        free.append(more.free_memory()[0])
    assert free[0] - free[1] == PAGE
    driver.release_context(1)
    assert cuda_driver.counts() == {"contexts": 1}
    driver.set_context(contexts[0])
    with refused(201):
        driver.set_context(contexts[1])


def test_a_call_fails_as_often_as_asked(context: int) -> None:
    def code() -> int:
        try:
            driver.free(driver.allocate(PAGE))
        except driver.DriverError as error:
            return error.code
        return 0

    cuda_driver.fail("cuMemAlloc_v2", 2, at=3, times=2)
    assert [code() for _ in range(6)] == [0, 0, 2, 2, 0, 0]
    cuda_driver.fail("cuMemAlloc_v2", 801, times=0)
    assert [code() for _ in range(3)] == [801] * 3
    cuda_driver.set("cuMemAlloc_v2.code", 0)
    assert code() == 0
    assert cuda_driver.get("cuMemAlloc_v2.called") == 10
    with pytest.raises(KeyError):
        cuda_driver.fail("cuMemAlloc", 2)


def test_a_call_may_not_return(context: int) -> None:
    cuda_driver.set("cuMemGetInfo_v2.hang", 1)
    thread = in_thread(more.free_memory)
    wait_until(lambda: cuda_driver.get("cuMemGetInfo_v2.called") == 1)
    driver.free(driver.allocate(PAGE))
    assert thread.is_alive()
    cuda_driver.set("cuMemGetInfo_v2.hang", 0)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("setting", ["hang", "hang_gpu"])
def test_what_hangs_leaves_others_alone(setting: str) -> None:
    """The first stream, or all of the first GPU."""
    cuda_driver.set("devices", 2)
    streams = []
    for ordinal in range(2):
        driver.set_context(driver.retain_context(ordinal))
        streams.append(driver.create_stream())
    page, values = pinned(PAGE)
    slots = values.view("u8")
    slots[:2] = 0
    cuda_driver.set(setting, 1)
    for number, stream in enumerate(streams):
        driver.write_value(stream, page + 8 * number, 1)
    driver.synchronize_stream(streams[1])
    assert slots[:2].tolist() == [0, 1]
    cuda_driver.set(setting, 0)
    driver.synchronize_stream(streams[0])
    assert slots[0] == 1


@pytest.mark.parametrize("code", [226, 700, 709, 721, 810])
def test_a_sticky_error_stays(context: int, code: int) -> None:
    cuda_driver.fail("cuMemGetInfo_v2", code, at=2)
    more.free_memory()
    for use in (more.free_memory, driver.synchronize, lambda: driver.retain_context(0)):
        with pytest.raises(GpuLost, match=f"error {code} "):
            use()
    assert driver.driver_version() == 12080


def test_a_fork_has_no_gpu(context: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Threads, of which the child uses none.
        pid = os.fork()
    if pid == 0:
        try:
            with refused(3):
                driver.allocate(PAGE)
            driver._library.cache_clear()
            with refused(3):
                driver.device_uuids()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    driver.allocate(PAGE)


def test_a_machine_may_have_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda.so.of.nobody")
    with pytest.raises(driver.DriverError, match="no NVIDIA driver here"):
        driver.device_uuids()
