# SPDX-License-Identifier: Apache-2.0
"""Pinning the host pool in pieces, over the driver of the tests."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from lmcache_redis.cache.arena import Arena
from lmcache_redis.device import driver, pinning
from lmcache_redis.device.gpu import UNPINNED
from lmcache_redis.device.pinning import PoolPinning
from lmcache_redis.errors import DeviceError, GpuLost
from lmcache_redis.native.madvise import PAGE_SIZE_BYTES
from tests import cuda_driver
from tests.cuda_driver import more
from tests.servers import wait_until

pytestmark = pytest.mark.skipif(
    cuda_driver.missing() is not None, reason=f"{cuda_driver.missing()}"
)

SLOT_BYTES = 1 << 20
PIECE_BYTES = 2 * SLOT_BYTES
_libc = ctypes.CDLL(None, use_errno=True)


def present_pages(address: int, size_bytes: int) -> int:
    found = (ctypes.c_ubyte * (size_bytes // PAGE_SIZE_BYTES))()
    assert _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), found) == 0
    return sum(page & 1 for page in found)


class Pool:
    """Seven slots in four pieces, the last of one slot; and what their pinning says."""

    def __init__(self) -> None:
        self.arena = Arena(7 * SLOT_BYTES, SLOT_BYTES)
        self.prefaulted_bytes = self.arena.size_bytes
        self.lost: list[GpuLost] = []
        self.context = driver.retain_context(0)
        self.pinning = PoolPinning(
            self.arena.base_address, 7, SLOT_BYTES, lambda: self.prefaulted_bytes, self.lost.append
        )

    def begin(self) -> None:
        self.pinning.begin(partial(driver.set_context, self.context))

    def wait(self, pieces: int) -> None:
        size_bytes = min(pieces * PIECE_BYTES, self.arena.size_bytes)
        wait_until(lambda: self.pinning.pinned_bytes == size_bytes, f"{pieces} pinned pieces")
        assert cuda_driver.get("pinned") == pieces

    def copies(self, slot: int) -> bool:
        """Whether a GPU's bytes arrive in a slot, pinned or not."""
        driver.set_context(self.context)
        address, stream = driver.allocate(SLOT_BYTES), driver.create_stream()
        host = self.arena.base_address + slot * SLOT_BYTES
        kv = ctypes.create_string_buffer(b"kv" * 10)
        more.copy_in(address, ctypes.addressof(kv), 20)
        driver.enqueue_copy_out(host, address, 20, stream)
        driver.synchronize_stream(stream)
        driver.destroy_stream(stream)
        driver.free(address)
        return ctypes.string_at(host, 20) == b"kv" * 10


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(pinning, "_PIECE_BYTES", PIECE_BYTES + SLOT_BYTES // 2)
    monkeypatch.setattr(pinning, "_PREFAULT_POLL_S", 0.001)
    cuda_driver.load()
    cuda_driver.reset()
    pool = Pool()
    yield pool
    pool.pinning.close(unpin=False)
    cuda_driver.reset()


def test_pieces_end_on_slots(pool: Pool) -> None:
    """Known are those that are pinned: copies of others go one by one."""
    slots = pool.arena.base_address + SLOT_BYTES * np.arange(7)
    assert pool.pinning.pieces_of(slots).tolist() == [UNPINNED] * 7
    pool.prefaulted_bytes = 2 * PIECE_BYTES
    pool.begin()
    pool.wait(2)
    assert pool.pinning.pieces_of(slots).tolist() == [0, 0, 1, 1, *[UNPINNED] * 3]
    pool.prefaulted_bytes = pool.arena.size_bytes
    pool.wait(4)
    assert pool.pinning.pieces_of(slots + SLOT_BYTES - 1).tolist() == [0, 0, 1, 1, 2, 2, 3]
    elsewhere = slots[[0, 0]] + (-1, 7 * SLOT_BYTES)
    assert pool.pinning.pieces_of(elsewhere).tolist() == [UNPINNED] * 2


def test_everything_is_pinned_once_and_unpinned(pool: Pool) -> None:
    pool.begin()
    pool.begin()
    pool.wait(4)
    assert pool.copies(6)
    pool.pinning.close()
    assert cuda_driver.counts() == {"contexts": 1}
    assert cuda_driver.get("cuMemHostRegister_v2.called") == 4
    pool.begin()
    pool.pinning.close()
    assert cuda_driver.get("cuMemHostRegister_v2.called") == 4
    assert pool.pinning.failure == ""


def test_pages_are_present_before_they_are_pinned(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would zero pages under the locks for which engines wait."""
    present: list[tuple[int, int]] = []

    def pin(address: int, size_bytes: int) -> None:
        present.append((present_pages(address, size_bytes), size_bytes // PAGE_SIZE_BYTES))
        pinned(address, size_bytes)

    pinned = driver.pin
    monkeypatch.setattr(driver, "pin", pin)
    pool.begin()
    pool.wait(4)
    assert present == [(512, 512)] * 3 + [(256, 256)]


def test_it_follows_the_thread_that_faults_in(pool: Pool) -> None:
    pool.prefaulted_bytes = PIECE_BYTES - 1
    pool.begin()
    time.sleep(0.05)
    assert cuda_driver.get("pinned") == 0
    pool.prefaulted_bytes = PIECE_BYTES
    pool.wait(1)
    time.sleep(0.05)
    assert (cuda_driver.get("pinned"), pool.pinning.pinned_bytes) == (1, PIECE_BYTES)
    pool.pinning.close()
    assert cuda_driver.get("pinned") == 0


@pytest.mark.parametrize("ends", ["whole", "stopped"])
def test_a_prefault_that_has_ended_holds_nothing_up(ends: str) -> None:
    arena, stop = Arena(1 << 20, SLOT_BYTES), threading.Event()
    assert arena.prefaulted_bytes == 0
    if ends == "stopped":
        stop.set()
    assert arena.prefault(stop) is (ends == "whole")
    assert arena.prefaulted_bytes == arena.size_bytes


def test_it_pauses_for_as_long_as_a_piece_took(pool: Pool) -> None:
    took_s = 0.03
    cuda_driver.set("pin_us_per_mib", int(took_s * 1e6 / 2))
    began_s = time.monotonic()
    pool.begin()
    pool.wait(4)
    assert time.monotonic() - began_s > 3 * 2 * took_s


def test_a_piece_that_fails_leaves_the_rest_unpinned(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_driver.fail("cuMemHostRegister_v2", 2, at=3)
    pool.begin()
    wait_until(lambda: pool.pinning.failure, "a failure")
    assert (cuda_driver.get("pinned"), pool.pinning.pinned_bytes) == (2, 2 * PIECE_BYTES)
    (said,) = caplog.records
    assert "CUDA error 2" in said.message
    assert said.message.startswith("4 of 7 MiB")
    assert all(pool.copies(slot) for slot in (0, 3, 4, 6))
    assert not pool.lost
    pool.pinning.close()
    assert cuda_driver.get("pinned") == 0


def test_a_lost_gpu_is_told(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    cuda_driver.fail("cuMemHostRegister_v2", 700, at=2)
    pool.begin()
    wait_until(lambda: pool.lost, "a lost GPU")
    assert pool.lost[0].code == 700
    assert not caplog.records, "whoever is told says it"
    pool.pinning.close(unpin=False)


def test_a_context_that_cannot_be_used_pins_nothing(pool: Pool) -> None:
    pool.pinning.begin(partial(driver.release_context, 99))
    wait_until(lambda: pool.pinning.failure, "a failure")
    pool.pinning.close()
    assert cuda_driver.get("cuMemHostRegister_v2.called") == 0


def test_a_bug_leaves_the_rest_unpinned(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    pool.pinning.begin(fail)
    wait_until(lambda: pool.pinning.failure, "a failure")
    assert "a bug" in pool.pinning.failure
    pool.pinning.close()
    assert "Traceback" in caplog.text


def stop_in_the_middle(pool: Pool) -> Callable[[], float]:
    cuda_driver.set("pin_us_per_mib", 150_000)
    pool.begin()
    wait_until(lambda: cuda_driver.get("cuMemHostRegister_v2.called") == 1, "a piece")
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


def test_it_stops_after_the_piece_it_pins(pool: Pool) -> None:
    took_s = stop_in_the_middle(pool)
    pool.pinning.close()
    assert took_s() < 1
    assert cuda_driver.get("cuMemHostRegister_v2.called") == 1
    assert cuda_driver.counts() == {"contexts": 1}


def test_a_driver_that_hangs_does_not_hold_up_the_end(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_UNPIN_DEADLINE_S", 0.05)
    took_s = stop_in_the_middle(pool)
    with pytest.raises(DeviceError, match=r"not answered within 0\.05 s"):
        pool.pinning.close()
    assert took_s() < 0.3
    monkeypatch.setattr(pinning, "_UNPIN_DEADLINE_S", 5.0)
    pool.pinning.close()


def test_what_a_driver_refuses_to_unpin_is_told(pool: Pool) -> None:
    pool.begin()
    pool.wait(4)
    cuda_driver.fail("cuMemHostUnregister", 713, at=2)
    with pytest.raises(DeviceError, match="713"):
        pool.pinning.close()
    assert cuda_driver.get("pinned") == 3


def test_memory_that_a_device_may_use_stays_pinned(pool: Pool) -> None:
    pool.begin()
    pool.wait(4)
    pool.pinning.close(unpin=False)
    assert cuda_driver.get("pinned") == 4
