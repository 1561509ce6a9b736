# SPDX-License-Identifier: Apache-2.0
"""A need of vLLM's insides: what it is, and whether a vLLM has it. `needs` lists them all."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from lmcache_redis.integrations.vllm.wrapping import wrap, wrap_once

OFF = "the cache stays off"

_REQUIRED: Any = object()
_NAME = re.compile(r"(?P<name>\w+)(?:>=(?P<since>[\d.]+))?(?:<(?P<until>[\d.]+))?")


@dataclass(frozen=True)
class Needed:
    """An attribute of vLLM's that no interface promises, or that not every version has.

    owner: a class (``module:Class``), a function that sets it, or a module, below ``vllm``.
    since, until: the first version that has it, and the first that does not have it any longer.
    default: what it counts as where it is missing; with none, that is an AttributeError.
    """

    owner: str
    name: str
    purpose: str
    without: str
    default: Any = _REQUIRED
    since: str = "0.0"
    until: str = ""

    def __str__(self) -> str:
        return f"{re.split('[.:]', self.owner)[-1]}.{self.name}"

    def of(self, owner: object) -> Any:
        """Its value. Raises AttributeError if it is missing and has no default."""
        if self.default is _REQUIRED:
            return getattr(owner, self.name)
        return getattr(owner, self.name, self.default)

    def load(self) -> Any:
        """Its value, of a module that this imports.

        Raises ImportError or AttributeError if it is missing and has no default.
        """
        try:
            return self.of(importlib.import_module(f"vllm.{self.owner}"))
        except ImportError:
            if self.default is _REQUIRED:
                raise
            return self.default

    def is_in(self, owner: object) -> bool:
        return hasattr(owner, self.name)

    def wrap(self, owner: object, around: Callable[..., Any]) -> None:
        wrap(owner, self.name, around)

    def wrap_once(self, owner: object, around: Callable[..., Any]) -> None:
        wrap_once(owner, self.name, around)

    def is_expected(self, version: str) -> bool:
        """Whether a version of vLLM has it. One that is not known has what the newest has."""
        here = _numbers(version)
        return _numbers(self.since) <= here and (not self.until or here < _numbers(self.until))

    def is_present(self, *, loads: bool = False) -> bool:
        """Whether the vLLM of this process has it.

        loads: imports its module. Without it, a module that is not imported yet counts as complete.
        """
        module, _, owner = self.owner.partition(":")
        module = f"vllm.{module}"
        try:
            if not loads and module not in sys.modules:
                return importlib.util.find_spec(module) is not None
            found: Any = importlib.import_module(module)
        except ImportError:
            return False
        if owner:
            found = getattr(found, owner, None)
        return found is not None and (hasattr(found, self.name) or _sets(found, self.name))


@dataclass(frozen=True)
class VllmOwner:
    """Where needs are."""

    place: str

    def need(self, name: str, purpose: str, without: str = "", default: Any = _REQUIRED) -> Needed:
        """name: with ``>=`` and ``<`` of versions, where not all of those supported have it.

        without: what happens without it; left out: its default stands for it.
        """
        found = _NAME.fullmatch(name)
        assert found is not None, name
        without = without or f"it counts as {default!r}"
        since, until = found["since"] or "0.0", found["until"] or ""
        return Needed(self.place, found["name"], purpose, without, default, since, until)


def _numbers(version: str) -> tuple[int, ...]:
    """Of a release; a build that has no number is later than all of them."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return (sys.maxsize,)
    return tuple(int(each or 0) for each in found.groups())


def _sets(owner: Any, name: str) -> bool:
    """Whether a class has a field of a name, or sets it in a method; of a function: uses it."""
    functions = [owner]
    for each in getattr(owner, "__mro__", ()):
        if name in vars(each).get("__dataclass_fields__", {}):
            return True
        functions += vars(each).values()
    return any(
        name in code.co_names and (each is owner or _stores(code, name))
        for each in filter(callable, functions)
        for code in _codes(getattr(inspect.unwrap(each), "__code__", None))
    )


def _stores(code: CodeType, name: str) -> bool:
    return any(e.argval == name and e.opname == "STORE_ATTR" for e in dis.get_instructions(code))


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from _codes(each)
