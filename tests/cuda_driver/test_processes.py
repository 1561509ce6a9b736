# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share, and settings of other processes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.cuda_driver.buffers import PAGE, bytes_at, on_gpu, refused, wait_until
from tests.cuda_driver.peers import Peer, PeerError

pytestmark = pytest.mark.servers

SIZE = cuda_driver.PIECE_BYTES + 3 * PAGE + 100  # in no block with others


@pytest.fixture
def peer(context: int) -> Iterator[Peer]:
    with closing(Peer()) as found:
        yield found


def exported(peer: Peer, size_bytes: int = SIZE) -> tuple[int, bytes]:
    address = peer(f"driver.allocate({size_bytes})")
    handle = peer(f"driver.export_memory({address} + 7)")
    assert isinstance(address, int)
    assert isinstance(handle, bytes)
    return address, handle


def test_memory_of_another_process_is_mapped(peer: Peer) -> None:
    theirs, handle = exported(peer)
    here = driver.open_memory(handle)
    assert driver.allocation_of(here + 5) == (here, SIZE)
    bytes_at(here, SIZE)[:] = np.arange(SIZE) % 251
    found = peer(f"bytes_at({theirs}, {SIZE})[-{PAGE}:].tolist()")
    assert found == [each % 251 for each in range(SIZE - PAGE, SIZE)]
    driver.close_memory(here)
    with refused(1):
        driver.close_memory(here)
    with refused(500):
        driver.allocation_of(here)


def test_a_second_opening_counts(peer: Peer) -> None:
    _, handle = exported(peer)
    here = driver.open_memory(handle)
    assert driver.open_memory(handle) == here
    driver.close_memory(here)
    assert driver.allocation_of(here).size_bytes == SIZE
    driver.close_memory(here)
    assert cuda_driver.counts() == {"contexts": 1}
    assert driver.open_memory(handle), "and it can be opened again"


def test_a_handle_is_for_other_processes(peer: Peer) -> None:
    _, handle = exported(peer)
    with pytest.raises(PeerError, match="error 201 "):
        peer(f"driver.open_memory({handle!r})")
    with refused(1):
        driver.open_memory(bytes(64))
    here = driver.open_memory(handle)
    with refused(1):
        driver.export_memory(here)


def test_a_mapping_outlives_the_exporter(peer: Peer) -> None:
    address, handle = exported(peer)
    peer(f"bytes_at({address}, {SIZE}).fill(9)")
    here = driver.open_memory(handle)
    peer.kill()
    assert (bytes_at(here, SIZE) == 9).all()
    driver.close_memory(here)
    with refused(400):
        driver.open_memory(handle)


def test_freed_memory_cannot_be_opened(peer: Peer) -> None:
    address, handle = exported(peer)
    peer(f"driver.free({address})")
    with refused(400):
        driver.open_memory(handle)
    exported(peer)  # Its descriptor has the same number.
    with refused(400):
        driver.open_memory(handle)


def test_memory_that_another_has_open_is_not_freed(peer: Peer) -> None:
    address, handle = exported(peer)
    here = driver.open_memory(handle)
    with pytest.raises(PeerError, match="error 1 "):
        peer(f"driver.free({address})")
    cuda_driver.set("free_exported", 1, peer.environment)
    peer(f"driver.free({address})")
    assert (bytes_at(here, SIZE) == 0xDD).all(), "it holds poison"
    driver.close_memory(here)


def test_an_opener_that_was_killed_does_not_count(peer: Peer) -> None:
    address, _ = on_gpu(SIZE)
    handle = driver.export_memory(address)
    peer(f"driver.open_memory({handle!r})")
    with refused(1):
        driver.free(address)
    peer.kill()
    driver.free(address)


def test_an_invisible_gpu_is_not_mapped(context: int) -> None:
    with closing(Peer(cuda_driver.environment(devices=2), CUDA_VISIBLE_DEVICES="1")) as peer:
        _, handle = exported(peer)
        with refused(101):
            driver.open_memory(handle)


def test_pieces_are_shared_by_descriptors(peer: Peer) -> None:
    size = cuda_driver.PIECE_BYTES
    theirs = peer("cuda_driver.map_pieces(2)")
    peer("globals().update(handle=ctypes.c_uint64(), fd=ctypes.c_int(), by=ctypes.byref)")
    base, handle = ctypes.c_uint64(), ctypes.c_uint64()
    driver._call("cuMemAddressReserve", ctypes.byref(base), 2 * size, 0, 0, 0)
    for piece in range(2):
        # The handle is released, and the descriptor stays.
        fd = peer(
            f"(driver._call('cuMemRetainAllocationHandle', by(handle), {theirs} + {piece * size}),"
            " driver._call('cuMemExportToShareableHandle', by(fd), handle.value, 1, 0),"
            " driver._call('cuMemRelease', handle.value), fd.value)[-1]"
        )
        own = os.open(f"/proc/{peer.pid}/fd/{fd}", os.O_RDWR)
        driver._call("cuMemImportFromShareableHandle", ctypes.byref(handle), own, 1)
        os.close(own)
        driver._call("cuMemMap", base.value + piece * size, size, 0, handle.value, 0)
        driver._call("cuMemRelease", handle.value)
    with refused(1):  # Without access.
        driver.enqueue_copy_out(driver.allocate_pinned(8), base.value, 8, driver.create_stream())
    access = np.array([1, 0, 3], np.uint32)
    driver._call("cuMemSetAccess", base.value, 2 * size, access.ctypes.data, 1)
    bytes_at(base.value, 2 * size)[size - 2 : size + 2] = 8
    assert peer(f"bytes_at({theirs} + {size} - 2, 4).tolist()") == [8] * 4
    assert cuda_driver.counts()["mappings"] == 2
    with refused(1):
        driver._call("cuMemAddressFree", base.value, 2 * size)
    driver._call("cuMemUnmap", base.value, 2 * size)
    driver._call("cuMemAddressFree", base.value, 2 * size)
    assert cuda_driver.counts() == {"contexts": 1, "pinned": 1, "streams": 1, "refusals": 2}


def test_an_exclusive_gpu_has_one_process() -> None:
    uuid = f"GPU-{os.getpid():032x}"  # No other test's.
    first = Peer(cuda_driver.environment(compute_mode=3, uuids=uuid))
    with closing(first), closing(Peer(first.environment, context=False)) as second:
        with pytest.raises(PeerError, match="error 46 "):
            second("driver.retain_context(0)")
        first.kill()
        second("driver.retain_context(0)")


def test_settings_of_another_process_change(peer: Peer) -> None:
    address = peer("driver.allocate_pinned(4096)")
    stream = peer("driver.create_stream()")
    cuda_driver.set("hang", -1, peer.environment)
    peer(f"driver.write_value({stream}, {address}, 5)")
    peer.begin(f"driver.synchronize_stream({stream})")
    called = "cuStreamSynchronize.called"
    wait_until(lambda: cuda_driver.get(called, peer.environment) == 1)
    time.sleep(0.05)
    cuda_driver.set("hang", 0, peer.environment)
    assert peer.end() is None
    cuda_driver.fail("cuMemAlloc_v2", 2, environment=peer.environment)
    with pytest.raises(PeerError, match="error 2 "):
        peer("driver.allocate(1)")
    assert cuda_driver.counts(peer.environment) == {"contexts": 1, "pinned": 1, "streams": 1}
    cuda_driver.set("lose", 700, peer.environment)
    with pytest.raises(PeerError, match="error 700 "):
        peer("driver.allocate(1)")
    assert driver.allocate(1), "others go on"


def test_an_older_driver_has_no_batches() -> None:
    with closing(Peer(cuda_driver.environment(batch=False))) as peer:
        assert peer("driver.has('cuMemcpyBatchAsync')") is False
        assert peer("driver.has('cuMemMap')") is True


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_that_is_missing_shows(stream: int, waits: bool) -> None:
    """One process fills memory late, and another reads it: wrong bytes without the signal."""
    size, wrong, slow_us = 16 * PAGE, 0, 2000 if waits else 10**6
    with closing(Peer()) as peer:
        target, handle = exported(peer)
        page, page_handle = exported(peer)
        source, theirs = peer(f"driver.allocate_pinned({size})"), peer("driver.create_stream()")
        here, host = driver.open_memory(handle), driver.allocate_pinned(size)
        signal = bytes_at(driver.open_memory(page_handle), 8).view("u8")
        for ticket in range(1, 30 if waits else 4):
            cuda_driver.set("delay_us", slow_us, peer.environment)
            peer(f"bytes_at({source}, {size}).fill({ticket})")
            peer(f"driver.enqueue_copy_in({target}, {source}, {size}, {theirs})")
            peer(f"driver.write_value({theirs}, {page}, {ticket})")
            if waits:
                wait_until(lambda: signal[0] == ticket)  # noqa: B023
            driver.enqueue_copy_out(host, here, size, stream)
            driver.synchronize_stream(stream)
            wrong += not (bytes_at(host, size) == ticket).all()
            cuda_driver.set("delay_us", 0, peer.environment)
            peer(f"driver.synchronize_stream({theirs})")
    assert (wrong == 0) is waits
