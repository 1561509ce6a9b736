# SPDX-License-Identifier: Apache-2.0
"""Tickets that a GPU writes and another process reads, over the driver of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lmcache_redis.device.signals import SLOTS, SignalPage, Signals, signals_of
from lmcache_redis.errors import DeviceError
from tests import cuda_driver
from tests.cuda_driver import more
from tests.cuda_driver.engine import Host, gpus
from tests.servers import wait_until

pytestmark = pytest.mark.skipif(cuda_driver.missing() is not None, reason="no gcc")


@pytest.fixture
def host() -> Iterator[Host]:
    with gpus() as host:
        yield host


@pytest.fixture
def signals(host: Host) -> Signals:
    return signals_of(0)


@pytest.fixture
def page(signals: Signals) -> Iterator[SignalPage]:
    page = SignalPage(signals.handle)
    yield page
    page.close()


def test_a_ticket_is_there_when_the_work_before_it_has_ended(
    host: Host, signals: Signals, page: SignalPage
) -> None:
    stream = host.stream(0)
    assert not page.has_happened(1)
    cuda_driver.set("hang", -1)
    ticket = signals.record(stream)
    assert not page.has_happened(ticket)
    cuda_driver.set("hang", 0)
    wait_until(lambda: page.has_happened(ticket), "a signal")


def test_a_slot_is_used_again_for_a_later_ticket(
    host: Host, signals: Signals, page: SignalPage
) -> None:
    stream = host.stream(0)
    tickets = []
    for _ in range(3 * SLOTS):
        tickets.append(signals.record(stream))
        if len(tickets) % SLOTS == 0:
            host.synchronize()
    assert tickets == list(range(1, 3 * SLOTS + 1))
    host.synchronize()
    assert all(page.has_happened(ticket) for ticket in tickets)
    assert not page.has_happened(3 * SLOTS + 1)


def test_a_gpu_that_hangs_is_told(host: Host, signals: Signals, page: SignalPage) -> None:
    """And no ticket is written over one that was not reached."""
    stream = host.stream(0)
    cuda_driver.set("hang", -1)
    tickets = [signals.record(stream) for _ in range(SLOTS)]
    for _ in range(2):
        with pytest.raises(DeviceError, match="512 signals: it hangs"):
            signals.record(stream)
    assert not any(page.has_happened(ticket) for ticket in tickets)
    cuda_driver.set("hang", 0)
    host.synchronize()
    assert all(page.has_happened(ticket) for ticket in tickets)
    assert signals.record(stream) == SLOTS + 1


def test_a_failed_write_takes_no_ticket(host: Host, signals: Signals) -> None:
    cuda_driver.fail("cuStreamWriteValue64_v2", 1)
    with pytest.raises(DeviceError, match="cuStreamWriteValue64_v2"):
        signals.record(host.stream(0))
    assert signals.record(host.stream(0)) == 1


def test_threads_have_different_tickets(host: Host, signals: Signals) -> None:
    found: list[int] = []

    def record() -> None:
        found.extend(signals.record(host.stream(0)) for _ in range(50))

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 201))


def test_pinned_memory_may_have_another_address_on_the_gpu() -> None:
    with gpus(distinct_pinned=1) as host:
        signals = signals_of(0)
        page = SignalPage(signals.handle)
        ticket = signals.record(host.stream(0))
        host.synchronize()
        assert page.has_happened(ticket)
        page.close()


def test_the_context_of_the_thread_stays() -> None:
    with gpus(devices=2) as host, host.on(1):
        signals_of(0).record(host.stream(0))
        assert more.current_device() == 1


def test_a_page_of_another_size_is_refused(signals: Signals) -> None:
    import msgspec

    with pytest.raises(DeviceError, match="a page of signals has 8 bytes"):
        SignalPage(msgspec.structs.replace(signals.handle, size_bytes=8))


def test_a_closed_page_is_not_read(signals: Signals) -> None:
    page = SignalPage(signals.handle)
    page.close()
    page.close()
    with pytest.raises(DeviceError, match="no longer mapped"):
        page.has_happened(1)
