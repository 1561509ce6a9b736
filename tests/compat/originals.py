"""Every name that the originals document, with its parameters there, and what differs here.

python -m tests.compat.originals     writes the tables into docs/reference/lmcache-names.md
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "lmcache-names.md"
_TABLES = re.compile(r"(<!-- names: begin -->\n).*?(<!-- names: end -->)", re.DOTALL)


@dataclass(frozen=True)
class Name:
    """A name of an original.

    parameters: as the original has them; None if it is not called. different: how and why; may be
    empty if it is the same. left_out: why it is not here.
    """

    name: str
    parameters: str | None = None
    different: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class Interface:
    """One module of the originals.

    here: the module of this package that stands for it. dated: which version the names are from.
    """

    title: str
    original: str
    here: str
    dated: str
    names: Sequence[Name]

    def find(self, name: str) -> Any:
        """What has that name here; its type if it is an attribute of instances; None if nothing."""
        found: Any = importlib.import_module(self.here)
        for part in name.split("."):
            kinds = found.__mro__ if isinstance(found, type) else ()
            annotated = [inspect.get_annotations(each).get(part) for each in kinds]
            found = getattr(found, part, next(filter(None, annotated), None))
        return found

    def verdict(self, each: Name) -> str:
        """The last column. Raises AssertionError if it would not be true."""
        found, where = self.find(each.name), f"{self.here}.{each.name}"
        if each.left_out:
            assert found is None, f"{where} is here"
            return f"left out: {each.left_out}"
        assert found is not None, f"{where} is missing"
        actual = parameters(found)
        if actual != each.parameters:
            assert each.different, f"{where} has the parameters {actual}"
            # Calls of the original stay calls here: its parameters come first, in its order.
            assert (actual or "").startswith(("(*", (each.parameters or "(")[:-1])), where
            return f"different: `{actual}`; {each.different}"
        return f"different: {each.different}" if each.different else "same"

    def table(self) -> str:
        """Its section of the page."""
        lines = [
            f"### {self.title}",
            "",
            f"`{self.original}`, here `{self.here}`.",
            *textwrap.wrap(self.dated, 120, break_long_words=False, break_on_hyphens=False),
            "",
            "| name | parameters | here |",
            "| --- | --- | --- |",
        ]
        for each in self.names:
            shown = "" if each.parameters is None else f"`{each.parameters}`"
            lines.append(f"| `{each.name}` | {shown} | {self.verdict(each)} |")
        return "\n".join(lines)


def parameters(found: Any) -> str | None:
    """``(first, second=default, *, by_name)``, without self and types; None if not callable."""
    if not callable(found) or (isinstance(found, type) and issubclass(found, Enum)):
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(kept))


def page() -> str:
    """docs/reference/lmcache-names.md with the tables as they are now."""
    from tests.compat.names import INTERFACES

    tables = "\n\n".join(interface.table() for interface in INTERFACES)
    return _TABLES.sub(lambda found: f"{found[1]}{tables}\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
