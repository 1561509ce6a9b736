"""Copies between a backend's memory and its callers' buffers, without the GIL.

Assigning to a slice of a memoryview holds the GIL for the whole copy: 6 ms for 32 MiB, in which no
other Python thread runs. numpy releases it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Block: TypeAlias = npt.NDArray[np.uint8]


def gathered(views: Sequence[memoryview]) -> Block:
    """The bytes of the views, in order, in new memory. Raises MemoryError."""
    block: Block = np.empty(sum(view.nbytes for view in views), np.uint8)
    gather(views, block)
    return block


def gather(views: Sequence[memoryview], block: Block) -> None:
    """Copy the views into the block, in order. No view is empty; their total is the block's."""
    start = 0
    for view in views:
        end = start + view.nbytes
        np.copyto(block[start:end], np.frombuffer(view, np.uint8))
        start = end


def scatter(block: Block, views: Sequence[memoryview]) -> None:
    """Copy the block into the views, in order. No view is empty; their total is the block's."""
    start = 0
    for view in views:
        end = start + view.nbytes
        np.copyto(np.frombuffer(view, np.uint8), block[start:end])
        start = end
