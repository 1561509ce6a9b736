"""One guard around every entry from vLLM: an error of ours never ends an engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

# vLLM shows the lines of loggers below its own name as its own.
logger = logging.getLogger("vllm.lmcache_redis")


class Breakable(Protocol):
    """Whose entries are guarded."""

    def broke(self) -> None:
        """Something of ours failed: from now on the cache of this engine is off."""


_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(otherwise: Callable[..., Any]) -> Callable[[_F], _F]:
    """Answers ``otherwise(self, *args)`` where the method raises; the traceback is logged once."""

    def guard(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception(
                    "%s failed: the cache of this engine is off from now on, its requests are "
                    "computed; please report this with the vLLM version", method.__name__,
                )  # fmt: skip
                self.broke()
                return otherwise(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return guard


def nothing(self: object, *args: object, **kwargs: object) -> None:
    """The answer where there is none to give."""
