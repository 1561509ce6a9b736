# SPDX-License-Identifier: Apache-2.0
"""What work leaves behind: reference cycles, which only the garbage collector frees, and objects.

An agent's collector runs rarely, so whatever is made often must be freed without it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

PACKAGE = "lmcache_redis"
# After each round; the last one decides.
_FREED_WITHIN_S = (2.0, 10.0, 90.0)


def left_by(work: Callable[[int], object], times: int, settle: Callable[[], object]) -> list[str]:
    """What calls of ``work`` leave, more often than one in four times, and how many of it.

    work: gets the number of the call, in rounds of ``times``. settle: returns when what the calls
    began has ended. Of the objects in cycles, and what hangs on them, those of this package count,
    and its functions and frames; of the others, those that each round leaves more of. (A thread
    that waits may hold what it had last, which is now more and now less.)
    """
    logging.disable()  # pytest keeps what is logged, with its tracebacks
    work(0)  # what is made once
    settle()
    gc.collect()
    gc.disable()
    gc.freeze()  # what tests before this one have left may be let go at any time
    try:
        for number in range(times):
            work(number)
        settle()
        for again, within_s in enumerate(_FREED_WITHIN_S, 1):
            before = _living()
            for number in range(again * times, (again + 1) * times):
                work(number)
            grown = _grown_since(before, times / 4, settle, within_s)
            if not grown:
                break
        cycles = _unreachable()
    finally:
        gc.unfreeze()
        gc.enable()
        logging.disable(logging.NOTSET)
    found = [f"{name}, in a cycle: {n}" for name, n in cycles.items() if n > times / 4]
    return found + [f"{name}: {n}" for name, n in grown.items()]


def _grown_since(
    before: Counter[str], least: float, settle: Callable[[], object], within_s: float
) -> dict[str, int]:
    # On a busy machine some of it is still going on, and a cancelled timer waits for its time.
    deadline_s = time.monotonic() + within_s
    while True:
        settle()
        grown = {name: n for name, n in (_living() - before).items() if n > least}
        if not grown or time.monotonic() > deadline_s:
            return grown
        time.sleep(1.0)


def _name(found: object) -> str:
    """Empty for what is not of the package."""
    if isinstance(found, FrameType):
        code = found.f_code
        return f"a frame of {code.co_qualname}" if PACKAGE in code.co_filename else ""
    named: Any = found if isinstance(found, FunctionType) else type(found)
    name = f"{named.__module__}.{named.__qualname__}"
    return name if name.startswith(PACKAGE) else ""


def _living() -> Counter[str]:
    kinds = Counter(map(type, gc.get_objects()))
    names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    return Counter({n: kinds[kind] for kind, n in names.items() if n.startswith(PACKAGE)})


def _unreachable() -> Counter[str]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(filter(None, map(_name, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
