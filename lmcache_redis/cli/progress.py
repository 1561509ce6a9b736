"""How far long work has come: a line each few seconds, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LINE_S = 5.0


def shown_progress(line_s: float = LINE_S) -> Callable[[str, int, int], None]:
    """A function that shows how far the work has come: `admin.survey.Progress`."""
    due_s = time.monotonic() + line_s

    def show(what: str, done: int, total: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + line_s
            print(f"{what}: {min(done, total):,} of {total:,}", file=sys.stderr, flush=True)

    return show
