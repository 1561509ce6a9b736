# SPDX-License-Identifier: Apache-2.0
"""The plot is a PNG, whatever was left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plane.plot import write_plot
from benchmarks.plane.rows import Row
from tests.benchmarks.rows import made_up_rows

pytest.importorskip("matplotlib")
ROWS = made_up_rows()


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [row for row in ROWS if row.client == "ours"],
        [row for row in ROWS if row.op != "scan"],
        [row for row in ROWS if row.op == "scan"],
        [row for row in ROWS if row.op == "load" and row.value_bytes == 2 << 20],
    ],
    ids=["everything", "ours alone", "no scans", "scans alone", "one operation and size"],
)
def test_the_plot_is_a_png(tmp_path: Path, rows: list[Row]) -> None:
    path = write_plot(tmp_path / "deeper" / "plot.png", rows, "a machine")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
