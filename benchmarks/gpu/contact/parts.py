# SPDX-License-Identifier: Apache-2.0
"""The parts in the order of what they are worth, and what each may take. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lmcache_redis.errors import ConfigError

# Seconds: more than a part takes where nothing is wrong.
_LIMITS_S = {
    "facts": 40.0,
    "raw": 60.0,
    "model": 100.0,
    "ipc_close": 40.0,
    "batch_soak": 60.0,
    "copies": 150.0,
    "pieces": 90.0,
    "marked": 150.0,
    "order": 70.0,
    "busy": 130.0,
    "stall": 90.0,
}
NAMES = tuple(_LIMITS_S)
# The former name is that of torch before 2.9.
_EXPANDABLE = dict.fromkeys(
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"
)


class Part(NamedTuple):
    """A process with a limit of its own. environment: variables beside those of this process."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str]


def parts_of(names: Collection[str], *, quick: bool) -> list[Part]:
    """Some parts, in their order; none named: all. quick: tiny sizes, to rehearse.

    Raises ConfigError for parts that do not exist.
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"no part {name!r} of first contact: there are {', '.join(NAMES)}")
    options = ("--quick",) if quick else ()
    return [
        Part(
            name,
            (sys.executable, "-m", "benchmarks.gpu.contact.child", name, *options),
            limit_s,
            _EXPANDABLE if name == "pieces" else {},
        )
        for name, limit_s in _LIMITS_S.items()
        if name in names or not names
    ]
