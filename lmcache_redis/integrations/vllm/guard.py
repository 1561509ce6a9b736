"""Keeps errors of the cache out of the engine: after one, requests are computed."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

# vLLM prints the log lines of loggers below its own name.
logger = logging.getLogger("vllm.lmcache_redis")

EVENTS = "KV events"

_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(otherwise: Callable[..., Any]) -> Callable[[_F], _F]:
    """Makes a method return ``otherwise(self, *args)`` if it raises.

    The error is logged with its traceback, and ``self.turn_off()`` turns the cache off.
    """

    def guard(method: _F) -> _F:
        @functools.wraps(method)
        def guarded_method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception(
                    "%s failed: the cache of this engine is now off and its requests are computed; "
                    "please report this with the vLLM version", method.__name__,
                )  # fmt: skip
                self.turn_off()
                return otherwise(self, *args, **kwargs)

        return guarded_method  # type: ignore[return-value]

    return guard


def reporting(otherwise: Callable[..., Any], what: str) -> Callable[[_F], _F]:
    """As `guarded`, for a method that only reports: the cache stays on.

    After an error, ``self._failed_reports`` has ``what`` (a plural), and no method that reports it
    is called again.
    """

    def guard(method: _F) -> _F:
        @functools.wraps(method)
        def guarded_method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if what not in self._failed_reports:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self._failed_reports.add(what)
                    logger.exception(
                        "%s failed: the connector no longer reports %s, and caches as before; "
                        "please report this with the vLLM version", method.__name__, what,
                    )  # fmt: skip
            return otherwise(self, *args, **kwargs)

        return guarded_method  # type: ignore[return-value]

    return guard


def engine_is_failing() -> bool:
    """Whether vLLM ends a step because of an error of its own, as in a forward without memory.

    It then calls the connector as after any other step, and the step's blocks were not computed.
    """
    return sys.exc_info()[0] is not None


def nothing(self: object, *args: object, **kwargs: object) -> None:
    """Returns None: the `otherwise` of methods that return nothing."""
