"""docs/compatibility.md is true: every name is in its module, with the listed parameters."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

from lmcache_redis import backends

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
ROW = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)` \|([^|]*)\|[^|]*\|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text())


def parameters(found: Any) -> list[str]:
    """As the page has them: `name`, or `name=` for what is given by name only."""
    if not callable(found) or (isinstance(found, type) and issubclass(found, Enum)):
        return []
    return [
        f"{name}=" if each.kind is each.KEYWORD_ONLY else name
        for name, each in inspect.signature(found).parameters.items()
        if name != "self"
    ]


def test_names_and_parameters() -> None:
    wrong = {}
    for name, module, listed in ROWS:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            wrong[name] = "missing"
        elif parameters(found) != re.findall(r"`([\w=]+)`", listed):
            wrong[name] = str(parameters(found))
    assert not wrong


def test_every_line_of_the_tables_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) >= 50


def test_the_former_name_of_the_backends() -> None:
    assert importlib.import_module("lmcache_redis.storage").__all__ == backends.__all__
