# SPDX-License-Identifier: Apache-2.0
"""Streams, events, and values that a stream writes."""

from __future__ import annotations

import pytest

from lmcache_redis.device import driver
from lmcache_redis.errors import GpuLost
from tests import cuda_driver
from tests.cuda_driver import more
from tests.cuda_driver.buffers import PAGE, in_thread, on_gpu, pinned, refused
from tests.servers import wait_until


def test_a_value_is_written_after_earlier_work(stream: int) -> None:
    address, memory = on_gpu(64 * PAGE)
    source, written = pinned(64 * PAGE)
    page, values = pinned(PAGE)
    slots = values.view("u8")
    cuda_driver.set("piece_bytes", 512)
    cuda_driver.set("delay_us", 100)
    for ticket in range(1, 20):
        written[:] = ticket
        driver.enqueue_copy_in(address, source, 64 * PAGE, stream)
        driver.write_value(stream, page + 8 * ticket, ticket)
        wait_until(lambda: slots[ticket] == ticket)  # noqa: B023
        assert (memory == ticket).all()


def test_a_value_needs_an_aligned_place_on_the_gpu(stream: int) -> None:
    page, _ = pinned(PAGE)
    for wrong in (page + 4, page + PAGE, 4096):
        with refused(1):
            driver.write_value(stream, wrong, 1)
    address, memory = on_gpu(PAGE)
    driver.write_value(stream, address + 8, 2**64 - 1)
    driver.synchronize_stream(stream)
    assert memory[8:16].view("u8") == 2**64 - 1
    cuda_driver.set("write_values", 0)
    assert not driver.device_attribute(driver.Attribute.WRITES_64_BIT_VALUES, 0)
    with refused(801):
        driver.write_value(stream, page, 1)


def test_streams_have_no_order_among_themselves(stream: int) -> None:
    second = driver.create_stream()
    page, values = pinned(PAGE)
    slot = values.view("u8")[:1]
    cuda_driver.set("delay_us", 500)
    last = set()
    for _ in range(40):
        driver.write_value(stream, page, 1)
        driver.write_value(second, page, 2)
        driver.synchronize()
        last.add(int(slot[0]))
    assert last == {1, 2}


def test_an_event_happens_when_earlier_work_has_ended(stream: int) -> None:
    event = driver.create_event()
    assert more.has_happened(event)  # Never recorded.
    page, values = pinned(PAGE)
    slot = values.view("u8")[:1]
    cuda_driver.set("hang", -1)
    driver.write_value(stream, page, 1)
    driver.record_event(event, stream)
    assert not more.has_happened(event)
    cuda_driver.set("hang", 0)
    driver.wait_for(event)
    assert more.has_happened(event)
    assert slot[0] == 1
    cuda_driver.set("hang", -1)
    driver.write_value(stream, page, 2)
    assert more.has_happened(event), "what was enqueued later does not matter"
    cuda_driver.set("hang", 0)


def test_what_is_destroyed_is_not_used(stream: int) -> None:
    event = driver.create_event()
    page, values = pinned(PAGE)
    driver.destroy_event(event)
    driver.write_value(stream, page, 3)
    driver.destroy_stream(stream)  # It ends what was enqueued.
    wait_until(lambda: values.view("u8")[0] == 3)
    for use in (
        lambda: driver.synchronize_stream(stream),
        lambda: driver.write_value(stream, page, 1),
        lambda: driver.destroy_stream(stream),
        lambda: more.has_happened(event),
        lambda: driver.destroy_event(event),
    ):
        with refused(400):
            use()
    assert cuda_driver.counts() == {"contexts": 1, "pinned": 1, "refusals": 5}


@pytest.mark.parametrize("hangs", [0, -1])
def test_a_sticky_error_ends_every_wait(stream: int, hangs: int) -> None:
    page, values = pinned(PAGE)
    ended = []
    values[:] = 0
    cuda_driver.set("hang", hangs)
    cuda_driver.set("delay_us", 10**10)
    driver.write_value(stream, page, 1)

    def wait() -> None:
        try:
            driver.synchronize_stream(stream)
        except GpuLost as error:
            ended.append(error.code)

    thread = in_thread(wait)
    wait_until(lambda: cuda_driver.get("cuStreamSynchronize.called") == 1)
    thread.join(0.02)
    assert thread.is_alive()
    cuda_driver.set("lose", 719)
    thread.join(20)
    assert ended == [719]
    for use in (driver.create_stream, driver.synchronize, lambda: driver.allocate(1)):
        with pytest.raises(GpuLost, match="error 719 "):
            use()
    assert not values.any(), "nothing more is done"
