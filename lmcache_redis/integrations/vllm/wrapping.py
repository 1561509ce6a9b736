# SPDX-License-Identifier: Apache-2.0
"""Wraps functions and methods of vLLM's, to notice calls that no interface tells of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# On a function that `wrap_once` has made.
_WRAPPED = "lmcache_redis_wrapped"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """From now on ``around(found, *args)`` is called in place of ``found(*args)``.

    Raises AttributeError if ``owner`` (an object, a class or a module) has nothing of this name.
    """
    found = getattr(owner, name)

    @functools.wraps(found)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(found, *args, **kwargs)

    setattr(owner, name, wrapper)


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """As `wrap`, unless it was called before for the same name, whatever else wraps it since."""
    if not hasattr(getattr(owner, name), _WRAPPED):
        wrap(owner, name, around)
        setattr(getattr(owner, name), _WRAPPED, True)
