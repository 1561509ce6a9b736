# SPDX-License-Identifier: Apache-2.0
"""What a link knows of its agent: whether it is there, how long it may be silent, and errors."""

from __future__ import annotations

import logging
import math
import random
import time

logger = logging.getLogger("vllm.lmcache_redis")

_ABSENT_S = 5.0
_ALONE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _ROW_S = 0.2, 5.0, 60.0
# To map the memory of a GPU, the agent waits for the driver, which other processes may hold up.
_MAPPING_S = 10.0
# A turn of a link takes half of that, if its thread runs.
_LONGEST_TURN_S = 0.4


class AgentNews:
    """Says what becomes of the agent: in the log, or unless it ``speaks`` for debugging only.

    Another link of the engine speaks then. What is wrong for a minute is said all the same: it may
    be wrong for this link alone.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._absent_at_s = time.monotonic() + _ABSENT_S
        self._kept: tuple[float, str, tuple[object, ...]] | None = None  # when to say it

    def say(self, level: int, line: str, *values: object, always: bool = False) -> None:
        is_said = always or self._speaks
        logger.log(level if is_said else logging.DEBUG, line, *values, stacklevel=2)
        if is_said or level < logging.WARNING:
            self._kept = None
        else:
            self._kept = (time.monotonic() + _ALONE_S, line, values)

    def answers(self) -> None:
        """An agent does, be it with a refusal."""
        self._absent_at_s = math.inf

    def is_absent(self, endpoint: str, now_s: float) -> None:
        """None answers, or none has answered so far."""
        if self._kept is not None and now_s > self._kept[0]:
            _, line, values = self._kept
            self._kept = None
            logger.warning(line, *values)
        if now_s > self._absent_at_s:
            self._absent_at_s = math.inf
            self.say(
                logging.WARNING,
                "no agent answers at %s: computing without the cache until one does",
                endpoint,
            )


class Patience:
    """How long an agent may be silent, and is. is_mapping: it maps memory, as it said last.

    Silence is what a thread hears that listens: one that waits for a core or the GIL hears nothing.
    """

    def __init__(self, dead_after_s: float) -> None:
        self.is_mapping = False
        self._dead_after_s = dead_after_s
        self._silent_s = self._listened_s = 0.0

    def heard(self) -> None:
        self._silent_s = 0.0

    def is_over(self, now_s: float) -> bool:
        """Asked in each turn."""
        self._silent_s += min(now_s - self._listened_s, _LONGEST_TURN_S)
        self._listened_s = now_s
        return self._silent_s > self.seconds

    @property
    def seconds(self) -> float:
        return max(self._dead_after_s, _MAPPING_S) if self.is_mapping else self._dead_after_s


class ErrorRow:
    """Errors that were not expected, one after the other: a row ends with a minute without any.

    is_open: what the last one has left is not mended yet.
    """

    def __init__(self) -> None:
        self.length = 0
        self.is_open = False
        self._last_s = 0.0

    def add(self, now_s: float) -> float:
        """One more; returns the seconds to pause."""
        if now_s - self._last_s > _ROW_S:
            self.length = 0
        self.length, self.is_open, self._last_s = self.length + 1, True, now_s
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self.length - 1, 16), _LONGEST_PAUSE_S)
        return random.uniform(0.5, 1.0) * pause_s
