"""What a link knows of its agent: whether it is there, how long it may be silent, and errors."""

from __future__ import annotations

import logging
import math
import random
import time

logger = logging.getLogger("vllm.lmcache_redis")

_ABSENT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _ROW_S = 0.2, 5.0, 60.0
# To map the memory of a GPU, the agent waits for the driver, which other processes may hold up.
_MAPPING_S = 10.0


class AgentNews:
    """Says what becomes of the agent: in the log, or unless it ``speaks`` for debugging only."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._absent_at_s = time.monotonic() + _ABSENT_S

    def say(self, level: int, line: str, *values: object, always: bool = False) -> None:
        is_said = always or self._speaks
        logger.log(level if is_said else logging.DEBUG, line, *values, stacklevel=2)

    def answers(self) -> None:
        """An agent does, be it with a refusal."""
        self._absent_at_s = math.inf

    def is_absent(self, endpoint: str, now_s: float) -> None:
        """None has answered so far."""
        if now_s > self._absent_at_s:
            self._absent_at_s = math.inf
            self.say(
                logging.WARNING,
                "no agent answers at %s: computing without the cache until one does",
                endpoint,
            )


class Patience:
    """How long an agent may be silent. is_mapping: it maps memory, as it said last."""

    def __init__(self, dead_after_s: float) -> None:
        self.is_mapping = False
        self._dead_after_s = dead_after_s

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
