# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter, on CPU tensors. Run by `test_kernels`.

In a process of its own: TRITON_INTERPRET is read when Triton is imported, which other tests (and
torch) may have done before. The interpreter runs a program in some milliseconds, so tiles are
small here: pages of a few bytes are cut and share tiles as pages of kibibytes do on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device.kernels import source
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import staging_stride_bytes
from tests.device.moves import (
    KINDS,
    Make,
    Move,
    check_engine,
    check_gather,
    check_scatter,
    moves,
    table_over,
)

TILES = st.sampled_from([4, 16, 64])
MOST_PROGRAMS = 25  # a chunk


class Interpreted:
    """Tiles are larger if a chunk of ``n_blocks`` would take too many programs."""

    def __init__(
        self, layout: KVLayout, storages: Sequence[torch.Tensor], units: int, n_blocks: int
    ) -> None:
        self._table = table_over(layout, storages, units)
        while sum(len(each.rows) for each in self._table.launches(n_blocks)) > MOST_PROGRAMS:
            units *= 2
            self._table = table_over(layout, storages, units)

    def gather(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=False)

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=True)

    def _launch(self, ids: torch.Tensor, staging: torch.Tensor, *, scatter: bool) -> None:
        chunks, n_blocks = ids.shape
        stride_bytes = staging_stride_bytes(n_blocks * self._table.block_bytes)
        for width, rows in self._table.launches(n_blocks):
            source.move_tile[len(rows), chunks](
                torch.from_numpy(rows),
                ids,
                staging,
                n_blocks,
                stride_bytes,
                UNITS=self._table.units_per_tile,
                WIDTH=width,
                SCATTER=scatter,
            )


def interpreted(units: int, n_blocks: int) -> Make:
    return lambda layout, storages: Interpreted(layout, storages, units, n_blocks)


@settings(max_examples=50)
@given(moves(unique=False, skip=True), TILES)
def test_gather_equals_the_reference(move: Move, units: int) -> None:
    check_gather(interpreted(units, len(move.chunks[0])), move)


@settings(max_examples=50)
@given(moves(unique=True, skip=True), TILES)
def test_scatter_equals_the_reference(move: Move, units: int) -> None:
    check_scatter(interpreted(units, len(move.chunks[0])), move)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_engines(kind: str) -> None:
    check_engine(interpreted(16, 2), kind)
