# SPDX-License-Identifier: Apache-2.0
"""The native extension: the work for each stripe, without the GIL. Optional.

`moves` is the module of `module.c`, or None if it was not built (no C compiler when the package was
installed) or is disabled (LMCACHE_REDIS_NATIVE=0); `why_not` says which. Without it Python does the
same work: slower for small stripes, and with more CPU time.

`guard` is the module of `guard.c`, or None for the same reasons. Without it, an engine that
truncates its memory during a copy ends the agent (`lmcache_redis.device.cpu`). `copies` is that of
`copies.c`, which copies there; without it Python does, one piece after the other.

`packing` is that of `packing_module.c`, or None for the same reasons. Without it, payloads are
stored as they are: packing is slow in numpy. `lmcache_redis.chunks.packing` still unpacks with it.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

SWITCH: Final = "LMCACHE_REDIS_NATIVE"


def _load(name: str) -> tuple[ModuleType | None, str]:
    if os.environ.get(SWITCH, "") == "0":
        return None, f"{SWITCH}=0 is set"
    try:
        return importlib.import_module(f"lmcache_redis.native.{name}"), ""
    except ImportError as error:
        return None, (
            f"the native extension of lmcache_redis is missing ({error}): install a C compiler "
            "(gcc) and reinstall the package"
        )


moves, why_not = _load("_moves")
guard, _ = _load("_guard")
copies, _ = _load("_copies")
packing, why_not_packed = _load("_packing")
