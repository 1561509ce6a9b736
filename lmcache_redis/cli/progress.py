"""How far long work has come: a bar on a terminal, else a line each few seconds; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 5.0

# As `admin.survey.Progress`.
Progress = Callable[[str, int, int], None]


@contextmanager
def shown_progress(line_s: float = LINE_S) -> Iterator[Progress]:
    """A function that shows how far the work has come."""
    if not sys.stderr.isatty():
        yield _lines(line_s)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    tasks = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=min(done, total), total=total)

        yield show


def _lines(line_s: float) -> Progress:
    due_s = time.monotonic() + line_s

    def show(what: str, done: int, total: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + line_s
            print(f"{what}: {min(done, total):,} of {total:,}", file=sys.stderr, flush=True)

    return show
