# SPDX-License-Identifier: Apache-2.0
"""Keeps errors of the cache out of the engine: after one, requests are computed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

# vLLM prints the log lines of loggers below its own name.
logger = logging.getLogger("vllm.lmcache_redis")

EVENTS = "KV events"

_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(otherwise: Callable[..., Any], report: str = "") -> Callable[[_F], _F]:
    """Makes a method return ``otherwise(self, *args)`` if it raises, and turns the cache off.

    report: what the method makes (a plural), if it only reports. Then the cache stays on, and with
    ``report`` in ``self._failed_reports`` no such method is called again.
    """

    def guard(method: _F) -> _F:
        @functools.wraps(method)
        def guarded_method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not report or report not in self._failed_reports:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    what = "the cache of this engine is now off and its requests are computed"
                    if report:
                        what = f"the connector no longer reports {report}, and caches as before"
                    please = "please report this with the vLLM version"
                    logger.exception("%s failed: %s; %s", method.__name__, what, please)
                    if report:
                        self._failed_reports.add(report)
                    else:
                        self.turn_off()
            return otherwise(self, *args, **kwargs)

        return guarded_method  # type: ignore[return-value]

    return guard


def nothing(self: object, *args: object, **kwargs: object) -> None:
    """Returns None: the `otherwise` of methods that return nothing."""
