# SPDX-License-Identifier: Apache-2.0
"""Allocations and pinned memory."""

from __future__ import annotations

import pytest

from benchmarks.gpu.contact.exporter import map_pieces
from lmcache_redis.device import driver, kernels
from tests import cuda_driver
from tests.cuda_driver.buffers import FRESH, PAGE, in_thread, on_gpu, pageable, pinned, refused


def test_fresh_memory_is_poison(context: int) -> None:
    for _, memory in (on_gpu(5000), pinned(5000)):
        assert (memory == FRESH).all()


def test_memory_is_freed_once(context: int) -> None:
    address = driver.allocate(PAGE)
    with refused(1):
        driver.free(address + 8)
    driver.free(address)
    with refused(1):
        driver.free(address)
    assert cuda_driver.counts() == {"contexts": 1, "refusals": 2}


def test_freeing_waits_for_the_work_of_the_gpu(stream: int) -> None:
    used, other = driver.allocate(PAGE), driver.allocate(PAGE)
    host, _ = pinned(PAGE)
    cuda_driver.set("hang", -1)
    driver.enqueue_copy_out(host, used, PAGE, stream)
    thread = in_thread(lambda: driver.free(other))
    thread.join(0.1)
    assert thread.is_alive()
    cuda_driver.set("hang", 0)
    thread.join(20)
    assert not thread.is_alive()
    assert cuda_driver.counts()["allocations"] == 1


def test_work_that_finds_its_memory_gone_is_fatal(stream: int) -> None:
    used = driver.allocate(PAGE)
    host, _ = pageable(PAGE)
    driver.pin(host, PAGE)
    cuda_driver.set("hang", -1)
    driver.enqueue_copy_out(host, used, PAGE, stream)
    driver.unpin(host)
    cuda_driver.set("hang", 0)
    with refused(700):
        driver.synchronize_stream(stream)


def test_registrations_are_of_the_process_and_apart(context: int) -> None:
    host, _ = pageable(8 * PAGE)
    with refused(1):
        driver.pin(host, 1 << 44)
    with refused(1):
        driver.pin(driver.allocate(PAGE), PAGE)
    driver.pin(host + 2 * PAGE, 2 * PAGE)
    for first, pages in ((2, 2), (1, 2), (3, 1), (0, 8)):
        with refused(712):
            driver.pin(host + first * PAGE, pages * PAGE)
    driver.pin(host, 2 * PAGE)
    driver.pin(host + 4 * PAGE, PAGE + 8)
    with refused(712):  # It would share a page.
        driver.pin(host + 5 * PAGE + 8, 8)
    driver.unpin(host + 2 * PAGE)
    for wrong in (host + 2 * PAGE, host + PAGE):
        with refused(713):
            driver.unpin(wrong)
    counts = cuda_driver.counts()
    assert (counts["pinned"], counts["refusals"]) == (2, 2)


@pytest.mark.parametrize("distinct", [0, 1])
def test_registered_memory_has_an_address_on_the_gpu(stream: int, distinct: int) -> None:
    cuda_driver.set("distinct_pinned", distinct)
    host, memory = pageable(PAGE)
    with refused(1):
        driver.device_address(host)
    driver.pin(host, PAGE)
    seen = driver.device_address(host + 16)
    assert (seen == host + 16) is (not distinct)
    driver.write_value(stream, seen, 77)
    driver.synchronize_stream(stream)
    assert memory[16:24].view("u8") == 77
    if distinct:
        with refused(1):
            driver.write_value(stream, host + 16, 78)
    # Allocated memory is always where the host sees it.
    allocated = driver.allocate_pinned(PAGE)
    assert driver.device_address(allocated) == allocated


def test_a_context_ends_with_what_it_has(context: int) -> None:
    driver.allocate(PAGE)
    driver.allocate_pinned(PAGE)
    driver.create_stream()
    driver.create_event()
    driver.load_module(kernels.text("gather_16"))
    driver.release_context(0)
    assert cuda_driver.counts() == {}
    with refused(201):
        driver.allocate(PAGE)
    with refused(201):
        driver.release_context(0)


def test_a_context_is_of_one_thread(context: int) -> None:
    ended: list[bool] = []

    def other() -> None:
        driver.free(driver.allocate(PAGE))
        driver.set_context(0)
        ended.append(True)

    in_thread(other).join()
    assert ended
    driver.free(driver.allocate(PAGE))
    driver.set_context(0)
    with refused(201):
        driver.create_stream()


def test_pieces_are_mapped_one_after_the_other(stream: int) -> None:
    pieces, size = 3, cuda_driver.PIECE_BYTES
    address = map_pieces(pieces * size, size, 0)
    assert driver.allocation_of(address + size + 5) == (address + size, size)
    with refused(1):
        driver.export_memory(address)
    host, memory = pinned(2 * PAGE)
    memory[:] = 9
    driver.enqueue_copy_in(address + size - PAGE, host, 2 * PAGE, stream)  # Over a boundary.
    driver.synchronize_stream(stream)
    assert cuda_driver.counts()["mappings"] == cuda_driver.counts()["handles"] == pieces
    with refused(1):
        driver.enqueue_copy_in(address + pieces * size - PAGE, host, 2 * PAGE, stream)
