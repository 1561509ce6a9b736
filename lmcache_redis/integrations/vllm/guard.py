"""Keeps errors of the cache out of the engine: after one, requests are computed."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from types import FrameType

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


def nothing(self: object, *args: object, **kwargs: object) -> None:
    """Returns None: the `otherwise` of methods that return nothing."""


def recompute_failed_loads(connector: KVConnectorBase_V1) -> None:
    """Sets ``kv_load_failure_policy`` to ``recompute``; vLLM's default fails the request.

    The scheduler reads the policy from its own config after it has made the connector. A child of
    ``MultiConnector`` gets a copy of that config and no reference to its parent. The parents'
    constructors are still running, so the parents are found on the stack.
    """
    connector._kv_transfer_config.kv_load_failure_policy = "recompute"
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        parent = frame.f_locals.get("self")
        if isinstance(parent, KVConnectorBase_V1):
            parent._kv_transfer_config.kv_load_failure_policy = "recompute"
        frame = frame.f_back
