# SPDX-License-Identifier: Apache-2.0
"""Copies: when sources are read and destinations written, and what is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.cuda_driver import more
from tests.cuda_driver.buffers import FRESH, PAGE, in_thread, on_gpu, pageable, pinned, refused
from tests.servers import wait_until

STREAM, DURING_CALL = 1, 2  # when a copy of a batch reads its source
NONE = 2**64 - 1


def batch(
    copies: list[tuple[int, int, int]],
    stream: int | None,
    order: int = STREAM,
) -> tuple[int, int]:
    """cuMemcpyBatchAsync of (to, from, size): its error, or 0, and which copy is wrong."""
    to, sources, sizes = (np.array(each, np.uint64) for each in zip(*copies, strict=True))
    attributes = np.array([order, 0, 0, 0, 0, 0], np.uint32)
    failed, first = ctypes.c_size_t(), ctypes.c_size_t()
    code: int = driver._library().cuMemcpyBatchAsync(
        to.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(copies),
        attributes.ctypes.data, ctypes.byref(first), 1, ctypes.byref(failed), stream,
    )  # fmt: skip
    return code, failed.value


def test_a_copy_is_made_after_the_call(stream: int) -> None:
    """From and to pinned memory: the host must wait, and must leave the source alone."""
    address, _ = on_gpu(PAGE)
    source, written = pinned(PAGE)
    target, read = pinned(PAGE)
    cuda_driver.set("hang", -1)
    written[:] = 1
    driver.enqueue_copy_in(address, source, PAGE, stream)
    driver.enqueue_copy_out(target, address, PAGE, stream)
    written[:] = 2
    assert (read == FRESH).all()
    cuda_driver.set("hang", 0)
    driver.synchronize_stream(stream)
    assert (read == 2).all()


def test_a_copy_is_made_in_pieces(stream: int) -> None:
    size = 256 * PAGE
    address, memory = on_gpu(size)
    source, written = pinned(size)
    written[:] = 5
    cuda_driver.set("piece_bytes", 512)
    cuda_driver.set("delay_us", 20_000)
    driver.enqueue_copy_in(address, source, size, stream)
    wait_until(lambda: len(np.unique(memory)) == 2)
    cuda_driver.set("delay_us", 0)
    driver.synchronize_stream(stream)
    assert (memory == 5).all()


def test_pageable_memory_is_staged(stream: int) -> None:
    """The source is read, and the destination complete, when the call returns."""
    address, memory = on_gpu(PAGE)
    source, written = pageable(PAGE)
    target, read = pageable(PAGE)
    cuda_driver.set("delay_us", 10_000)
    late = 0
    for value in range(1, 30):
        written[:] = value
        driver.enqueue_copy_in(address, source, PAGE, stream)
        written[:] = 0
        late += memory[0] != value
        driver.enqueue_copy_out(target, address, PAGE, stream)
        assert (read == value).all()
    assert 0 < late < 29, "the GPU's memory is sometimes written later"


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_from_pageable_memory_may_wait_for_its_stream(stream: int, waits: bool) -> None:
    """The manual allows both."""
    cuda_driver.set("pageable_waits", 100 if waits else 0)
    address, (source, _) = driver.allocate(PAGE), pageable(PAGE)
    cuda_driver.set("hang", -1)
    thread = in_thread(lambda: driver.enqueue_copy_in(address, source, PAGE, stream))
    if waits:
        thread.join(0.1)
        assert thread.is_alive()
        cuda_driver.set("hang", 0)
    thread.join(20)
    assert not thread.is_alive()


def test_the_plain_copy_does_not_write_before_it_returns(context: int) -> None:
    """Of the driver's own: `more.copy_in` waits."""
    address, memory = on_gpu(PAGE)
    source, written = pageable(PAGE)
    written[:] = 3
    cuda_driver.set("hang", -1)
    more.copy_in_at_once(address, source, PAGE)
    written[:] = 4
    assert (memory == FRESH).all()
    cuda_driver.set("hang", 0)
    driver.synchronize()
    assert (memory == 3).all()
    cuda_driver.set("delay_us", 5000)
    more.copy_in(address, source, PAGE)
    assert (memory == 4).all()


def test_a_copy_lies_in_one_memory(stream: int) -> None:
    address, _ = on_gpu(4 * PAGE)
    host, _ = pageable(4 * PAGE)
    driver.pin(host, PAGE)
    driver.pin(host + PAGE, PAGE)
    driver.enqueue_copy_in(address, host, PAGE, stream)
    driver.enqueue_copy_in(address, host + 2 * PAGE, 2 * PAGE, stream)  # Pageable.
    for first, pages in ((0, 2), (1, 2), (0, 4)):
        with refused(1):
            driver.enqueue_copy_in(address, host + first * PAGE, pages * PAGE, stream)
    with refused(1):
        driver.enqueue_copy_in(address + 3 * PAGE, host + 2 * PAGE, 2 * PAGE, stream)
    with refused(1):
        driver.enqueue_copy_out(address, address + PAGE, PAGE, stream)
    with refused(1):
        driver.enqueue_copy_in(host, host + PAGE, PAGE, stream)
    with refused(1):
        driver.enqueue_copy_in(address, 4096, PAGE, stream)
    assert cuda_driver.get("refusals") == 7


def test_copies_of_a_batch_are_independent(stream: int) -> None:
    host, address = driver.allocate_pinned(3 * PAGE), driver.allocate(3 * PAGE)
    for copies in (
        [(address, host, PAGE), (address + PAGE - 1, host + PAGE, PAGE)],
        [(address, host, PAGE), (host + 2 * PAGE, address + 8, 8)],
    ):
        assert batch(copies, stream) == (1, NONE)
    one_source = [(address, host, PAGE), (address + PAGE, host, PAGE)]
    assert batch(one_source, stream) == (0, NONE)


def test_a_wrong_batch_is_refused_and_its_copy_named(stream: int) -> None:
    host, address = driver.allocate_pinned(PAGE), driver.allocate(PAGE)
    assert batch([(address, host, 8), (address + PAGE, host, 8)], stream) == (1, 1)
    good = [(address, host, 8)]
    assert batch(good, None) == (1, NONE), "not on the default stream"
    assert batch(good, stream, DURING_CALL) == (1, NONE), "not in another order than the stream's"


def test_a_batch_takes_the_address_of_the_gpu(stream: int) -> None:
    """Where registered memory has another than the host's, a single copy takes either."""
    cuda_driver.set("distinct_pinned", 1)
    (host, written), (address, memory) = pageable(2 * PAGE), on_gpu(2 * PAGE)
    driver.pin(host, 2 * PAGE)
    written[:] = 7
    there = driver.device_address(host)
    for source in (host, host + PAGE):
        copies = [(address, there, PAGE), (address + PAGE, source, PAGE)]
        assert batch(copies, stream) == (1, 1)
    assert cuda_driver.get("refusals") == 2
    assert batch([(address, there, 2 * PAGE)], stream) == (0, NONE)
    driver.synchronize_stream(stream)
    assert (memory == 7).all()
    driver.enqueue_copy_in(address, host, PAGE, stream)
    written[:] = 8
    driver.enqueue_copy_in(address, host, PAGE, stream)
    driver.synchronize_stream(stream)
    assert (memory[:PAGE] == 8).all()
