"""Memory that is used again, and never while anybody still reads it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from lmcache_redis.backends.copying import Block
from lmcache_redis.backends.recycling import LEAST_BYTES, Blocks

MIB = 1 << 20


def address(block: Block) -> int:
    return int(block.ctypes.data)


def test_memory_is_used_again_for_about_the_same_size() -> None:
    blocks = Blocks(8 * MIB)
    first = blocks.take(MIB)
    at = address(first)
    assert (first.nbytes, blocks.taken_bytes, blocks.free_bytes) == (MIB, MIB, 0)
    del first
    assert (blocks.taken_bytes, blocks.free_bytes) == (0, MIB)
    again = blocks.take(MIB - 1000)
    assert (address(again), again.nbytes) == (at, MIB - 1000)
    other = blocks.take(MIB)
    assert address(other) != at
    assert (blocks.taken_bytes, blocks.free_bytes) == (2 * MIB, 0)


@pytest.mark.parametrize(
    "refer",
    [
        lambda block: block,
        lambda block: block.data,
        lambda block: block.data[5:9],
        lambda block: block.data.toreadonly()[5:9].cast("B"),
        lambda block: block[5:9],
        lambda block: block[5:][:4],
        lambda block: np.frombuffer(block.data[5:9], np.uint8)[1:],
    ],
)
def test_not_while_there_is_a_reference(refer: Callable[[Block], object]) -> None:
    blocks = Blocks(8 * MIB)
    block = blocks.take(MIB)
    at = address(block)
    kept = refer(block)
    del block
    assert blocks.taken_bytes == MIB
    assert address(blocks.take(MIB)) != at
    del kept
    assert blocks.taken_bytes == 0
    assert at in {address(each) for each in [blocks.take(MIB), blocks.take(MIB)]}


def test_no_more_is_kept_than_was_said_and_what_was_used_last() -> None:
    blocks = Blocks(4 * MIB)
    large, small = [blocks.take(2 * MIB) for _ in range(3)], [blocks.take(MIB) for _ in range(3)]
    large.clear()
    assert blocks.free_bytes == 4 * MIB
    small.clear()
    assert (blocks.taken_bytes, blocks.free_bytes) == (0, 3 * MIB)
    held = [blocks.take(MIB) for _ in range(3)]
    assert blocks.free_bytes == 0
    blocks.close()
    held.clear()
    assert (blocks.taken_bytes, blocks.free_bytes) == (0, 0)


def test_small_ones_are_not_kept() -> None:
    blocks = Blocks(MIB)
    assert [blocks.take(nbytes).nbytes for nbytes in (1, LEAST_BYTES - 1)] == [1, LEAST_BYTES - 1]
    assert (blocks.taken_bytes, blocks.free_bytes) == (0, 0)


@pytest.mark.parametrize("nbytes", [LEAST_BYTES, LEAST_BYTES + 1, 3 * MIB - 1, 32 * MIB + 1])
def test_little_is_wasted(nbytes: int) -> None:
    blocks = Blocks(64 * MIB)
    block = blocks.take(nbytes)
    assert nbytes <= blocks.taken_bytes <= nbytes * 9 // 8
    block[:] = 7
    assert block.nbytes == nbytes


def test_a_block_may_go_while_its_thread_is_in_here() -> None:
    """As when the garbage collector runs at that moment: nobody waits, nothing is lost."""
    blocks = Blocks(8 * MIB)
    block = blocks.take(MIB)
    with blocks._lock:
        del block
        assert blocks.free_bytes == 0
    other = blocks.take(2 * MIB)
    assert (blocks.taken_bytes, blocks.free_bytes) == (other.nbytes, MIB)


def test_threads_have_blocks_of_their_own() -> None:
    blocks = Blocks(MIB)
    failures: list[str] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        held: list[Block] = []
        for turn in range(400):
            block = blocks.take(choose.choice((LEAST_BYTES, 70_000, 100_000)))
            block[:] = number
            held.append(block)
            if len(held) > 3:
                view = held.pop(choose.randrange(3)).data[10:-10]
                if bytes(view).strip(bytes([number])):
                    failures.append(f"{number} found other bytes in turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert blocks.taken_bytes == 0
    assert blocks.free_bytes <= MIB
