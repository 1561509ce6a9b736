"""What computing a prompt costs this engine, from its own steps; and what a request asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

logger = logging.getLogger("vllm.lmcache_redis")

# A step with fewer prompt tokens takes as long with none.
_LEAST_TOKENS = 64
# What the steps before a measured one count, against it.
_KEPT = 0.75


class PrefillRate:
    """Seconds per prompt token, of recent steps. Times are those of `time.monotonic()`.

    A step also computes the next tokens of running requests, so the rate falls when many run. Steps
    may overlap: one begins when the one before it has ended.
    """

    def __init__(self) -> None:
        self._scheduled: dict[int, tuple[int, float]] = {}  # by step: prompt tokens, when
        self._steps = 0
        self._last_end_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """Seconds per prompt token; 0.0: not measured yet."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def scheduled(self, prompt_tokens: int, now_s: float) -> int:
        """A step is scheduled. Returns its number for `ended`, or 0 if it is not measured."""
        if prompt_tokens < _LEAST_TOKENS:
            return 0
        self._steps += 1
        self._scheduled[self._steps] = (prompt_tokens, now_s)
        return self._steps

    def ended(self, step: int, now_s: float) -> None:
        """The step with this number has ended; 0: a step that is not measured."""
        tokens, scheduled_s = self._scheduled.pop(step, (0, now_s))
        if tokens:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + now_s - max(scheduled_s, self._last_end_s)
            for earlier in [each for each in self._scheduled if each < step]:
                del self._scheduled[earlier]
        self._last_end_s = now_s


class Wishes(NamedTuple):
    """What a request asks of the cache: ``kv_transfer_params={"lmcache_redis": {...}}``.

    load, store: whether its prefix may be loaded, and its KV stored. max_load_tokens: the end of
    the prefix that may be loaded; None: no limit.
    """

    load: bool = True
    store: bool = True
    max_load_tokens: int | None = None

    @staticmethod
    def of(params: object, request_id: str) -> Wishes:
        """The wishes of a request. Those that make no sense are logged and not followed."""
        found = params.get("lmcache_redis") if isinstance(params, Mapping) else None
        if found is None:
            return Wishes()
        if not isinstance(found, Mapping) or not found.keys() <= {*Wishes._fields}:
            _refuse(request_id, f"{found!r}: give some of {', '.join(Wishes._fields)}")
            return Wishes()
        wishes = Wishes()._replace(**found)
        for name in ("load", "store"):
            if not isinstance(getattr(wishes, name), bool):
                _refuse(request_id, f"{name}={getattr(wishes, name)!r}: give true or false")
                return Wishes()
        limit = wishes.max_load_tokens
        if limit is not None and (type(limit) is not int or limit < 0):
            _refuse(request_id, f"max_load_tokens={limit!r}: give a number of tokens")
            return Wishes()
        return wishes


def _refuse(request_id: str, why: str) -> None:
    logger.warning("request %s has kv_transfer_params with lmcache_redis %s", request_id, why)
