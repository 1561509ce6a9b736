# SPDX-License-Identifier: Apache-2.0
"""A method of the connector's own parts raises at a random call: the cache turns itself off."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

# What gives blocks back must work: it is not one of the parts that may fail.
_RELIABLE = {"BlockReferences", "LMCacheRedisConnector", "Engine"}
_MAY_FAIL = {("BlockReferences", "take")}
_MODULES = ("lmcache_redis.integrations.vllm.", "tests.integrations.played_memory")


class PlayedFault(Exception):
    """What the method raises."""


class Fault:
    """One method, and the call at which it raises. A context manager.

    before: whether it raises instead of doing its work, or once that is done. struck: 1 if it did.
    """

    def __init__(self, connector: Any, rng: random.Random) -> None:
        methods = sorted(_methods(connector._scheduler), key=lambda each: each[1:])
        self._owner, self._class, self._name = rng.choice(methods)
        self._call = int(rng.expovariate(1 / 30)) + 1
        self._before = rng.random() < 0.5
        self._method = vars(self._owner)[self._name]
        self._calls = 0
        self.struck = 0

    def __str__(self) -> str:
        when = "instead of" if self._before else "after"
        happened = "struck" if self.struck else "not struck"
        return f"{self._class}.{self._name}, {when} call {self._call}: {happened}"

    def __enter__(self) -> Fault:
        method = self._method

        def played(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            strikes = self._calls == self._call
            self.struck |= strikes
            if strikes and self._before:
                raise PlayedFault(str(self))
            result = method(*args, **kwargs)
            if strikes:
                raise PlayedFault(str(self))
            return result

        setattr(self._owner, self._name, played)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(self._owner, self._name, self._method)


def _methods(scheduler: Any) -> Iterator[tuple[type, str, str]]:
    """Of the classes of a scheduler's parts: the class, its name, and the name of a method."""
    from lmcache_redis.integrations.vllm.requests import RequestLookup, Tracked

    classes: dict[str, type] = {each.__name__: each for each in (Tracked, RequestLookup)}
    _collect(scheduler, classes)
    for name, owner in classes.items():
        for method, function in vars(owner).items():
            if not inspect.isfunction(function) or method.startswith("__"):
                continue
            if name not in _RELIABLE or (name, method) in _MAY_FAIL:
                yield owner, name, method


def _collect(part: Any, classes: dict[str, type]) -> None:
    found = type(part)
    if not found.__module__.startswith(_MODULES) or found.__name__ in classes:
        return
    classes[found.__name__] = found
    for each in getattr(part, "__dict__", {}).values():
        _collect(each, classes)
