# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share, and settings of other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.cuda_driver.buffers import PAGE, bytes_at, on_gpu, refused
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
    driver.close_memory(here)
    peer(f"driver.free({address})")


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
    theirs = peer(f"map_pieces({2 * size}, {size}, 0)")
    assert isinstance(theirs, int)
    base = driver.reserve_addresses(2 * size)
    for at in (0, size):
        # The handle is released, and the descriptor stays.
        handle = peer(f"driver.retain_allocation({theirs + at})")
        fd = peer(f"driver.export_allocation({handle})")
        peer(f"driver.release_allocation({handle})")
        own = os.open(f"/proc/{peer.pid}/fd/{fd}", os.O_RDWR)
        imported = driver.import_allocation(own)
        os.close(own)
        driver.map_allocation(base + at, size, imported)
        driver.release_allocation(imported)
    with refused(1):  # Without access.
        driver.enqueue_copy_out(driver.allocate_pinned(8), base, 8, driver.create_stream())
    driver.allow_access(base, 2 * size, 0)
    bytes_at(base, 2 * size)[size - 2 : size + 2] = 8
    assert peer(f"bytes_at({theirs} + {size} - 2, 4).tolist()") == [8] * 4
    assert cuda_driver.counts()["mappings"] == 2
    with refused(1):
        driver.free_addresses(base, 2 * size)
    driver.unmap(base, 2 * size)
    driver.free_addresses(base, 2 * size)
    assert cuda_driver.counts() == {"contexts": 1, "pinned": 1, "streams": 1, "refusals": 2}


def test_an_older_driver_has_no_batches() -> None:
    with closing(Peer(cuda_driver.environment(batch=False))) as peer:
        assert peer("driver.has('cuMemcpyBatchAsync')") is False
        assert peer("driver.has('cuMemMap')") is True
