# SPDX-License-Identifier: Apache-2.0
"""Runs the parts, and keeps each figure when it comes: on the screen and in two files.

    figures.md      a table, to read and to send
    figures.jsonl   the same, a line for each figure
    NAME.log        what else a part printed, with its stacks where it hung or crashed

This process calls no driver, so that none can take it along. Nothing here waits for a part for
longer than its limit, also if it cannot be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from benchmarks.gpu.contact.child import UNTIL_S
from benchmarks.gpu.contact.figures import (
    COLUMNS,
    Figure,
    Row,
    cells_of,
    failed,
    not_good,
    row_in,
    table_row,
)
from benchmarks.gpu.contact.parts import Part

_STACKS_WITHIN_S = 0.5
_KILLED_WITHIN_S = 5.0
_TAIL_LINES = 15


class Kept:
    """The figures of a run. Files of former runs in the same folder are continued."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.rows: list[Row] = []
        self._table = (out / "figures.md").open("a")
        self._lines = (out / "figures.jsonl").open("a")
        if not self._table.tell():
            self._table.write(table_row(COLUMNS) + table_row("---" for _ in COLUMNS))
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.add(Figure("run", "started", started).row())

    def add(self, row: Row) -> None:
        self.rows.append(row)
        cells = cells_of(row)
        for file, text in (
            (self._table, table_row(cells)),
            (self._lines, json.dumps(row) + "\n"),
        ):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        print("  ".join(cells).rstrip(), flush=True)

    def close(self) -> None:
        self._table.close()
        self._lines.close()


def run(parts: Sequence[Part], out: Path, limit_s: float) -> list[Row]:
    """The figures of the parts. limit_s: of all of them together; those behind it are not run."""
    kept = Kept(out)
    until_s = time.monotonic() + limit_s
    try:
        for part in parts:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                row = failed(part.name, "not run", f"all parts had {limit_s:g} s", "runs").row()
                kept.add(row)
            else:
                _run_part(part, min(part.limit_s, left_s), kept)
    finally:
        kept.close()
    return kept.rows


def report(rows: Sequence[Row], out: Path) -> bool:
    """Says what is not good; whether all is."""
    bad = not_good(rows)
    print(f"{len(bad)} of {len(rows)} figures are not good:" if bad else "every criterion is met")
    for row in bad:
        print("  " + "  ".join(cells_of(row)))
    print(f"the table is {out / 'figures.md'}; what the parts printed beside is in the folder")
    return not bad


def _run_part(part: Part, limit_s: float, kept: Kept) -> None:
    started_s = time.monotonic()
    print(f"== {part.name}, {limit_s:.0f} s at most", flush=True)
    with (kept.out / f"{part.name}.log").open("a") as log:
        process = subprocess.Popen(
            part.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **part.environment, UNTIL_S: str(started_s + limit_s)},
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        assert process.stdout is not None
        reading = (process.stdout, kept, log, tail)
        reader = threading.Thread(target=_read, args=reading, daemon=True)
        reader.start()
        try:
            ended_badly = _wait(process, limit_s)
        finally:
            _kill_session(process)
        reader.join(_KILLED_WITHIN_S)
    if ended_badly:
        print("".join(f"  | {line}" for line in tail), end="", flush=True)
        kept.add(failed(part.name, "ended", ended_badly, "by itself").row())
    print(f"== {part.name}: {time.monotonic() - started_s:.0f} s", flush=True)


def _read(lines: IO[str], kept: Kept, log: IO[str], tail: deque[str]) -> None:
    # ValueError: a file that was closed, after the wait for this thread.
    with lines, contextlib.suppress(ValueError):
        for line in lines:
            if row := row_in(line):
                kept.add(row)
            else:
                tail.append(line)
                log.write(line)
                log.flush()


def _wait(process: subprocess.Popen[str], limit_s: float) -> str:
    """How it ended, if not well."""
    try:
        code = process.wait(limit_s + _STACKS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"at its limit of {limit_s:.1f} s"
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with status {code}" if code else ""


def _kill_session(process: subprocess.Popen[str]) -> None:
    """The part and all that it has started. What the kernel holds in a driver may stay."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_WITHIN_S)
