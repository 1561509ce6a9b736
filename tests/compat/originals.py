# SPDX-License-Identifier: Apache-2.0
"""Every name that the originals document, with its parameters there, and what differs here.

`names.txt` has them. `# title | module there | module here` begins an interface, and `>` says which
version its names are from. `name(parameters there) | what is different here`, or `| left out: why`;
`| left out` alone: it is internal. A line that begins with spaces goes on with the one before.

python -m tests.compat.originals     writes the tables into docs/reference/lmcache-names.md
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "lmcache-names.md"
# Why a name is left out that the page does not list: its introduction says so of all of them.
INTERNAL = "queues, threads and helpers of LMCache's own client and backends"
_TABLES = re.compile(r"(<!-- names: begin -->\n).*?(<!-- names: end -->)", re.DOTALL)


@dataclass(frozen=True)
class Name:
    """A name of an original.

    parameters: as the original has them; None if it is not called. different: how; not empty if the
    parameters are others. left_out: why it is not here.
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
    names: list[Name]

    def find(self, name: str) -> Any:
        """What has that name here; its type if it is an attribute of instances; None if nothing."""
        found: Any = importlib.import_module(self.here)
        for part in name.split("."):
            kinds = found.__mro__ if isinstance(found, type) else ()
            annotated = [inspect.get_annotations(each).get(part) for each in kinds]
            found = getattr(found, part, next(filter(None, annotated), None))
        return found

    def check(self, each: Name) -> str:
        """What differs, new parameters first. Raises AssertionError if it would not be true."""
        found, where = self.find(each.name), f"{self.here}.{each.name}"
        if each.left_out:
            assert found is None, f"{where} is here"
            return ""
        assert found is not None, f"{where} is missing"
        actual, original = parameters(found), each.parameters
        if actual == original:
            return each.different
        assert each.different, f"{where} has the parameters {actual}"
        # Calls of the original stay calls here: its parameters come first, in its order.
        assert (actual or "").startswith(("(*", (original or "(")[:-1])), where
        if original is None or (actual or "").startswith("(*"):
            return each.different
        there = original[1:-1].split(", ")
        added = [one for one in (actual or "")[1:-1].split(", ") if one not in (*there, "*")]
        return "; ".join(filter(None, [f"`{', '.join(added)}`", each.different]))

    def section(self) -> str:
        """Its section of the page: what is different, and what is left out."""
        texts: dict[str, list[str]] = {}
        for each in self.names:
            text = self.check(each) or f"left out: {each.left_out}"
            if each.different or each.left_out not in ("", INTERNAL):
                texts.setdefault(text, []).append(f"`{each.name}`")
        lines = [f"`{self.original}` is `{self.here}` here. {self.dated}".strip(), ""]
        lines += [f"- {', '.join(names)}: {text}" for text, names in texts.items()]
        wrapped = (
            textwrap.fill(
                each, 120, subsequent_indent="  " * each.startswith("-"),
                break_long_words=False, break_on_hyphens=False,
            )
            for each in lines
        )  # fmt: skip
        return "\n".join([f"### {self.title}", "", *wrapped])


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


def interfaces() -> list[Interface]:
    """Those of `names.txt`."""
    found: list[Interface] = []
    text = Path(__file__).with_name("names.txt").read_text()
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line.startswith("# "):
            title, original, here = line[2:].split(" | ")
            found.append(Interface(title, original, here, "", []))
        elif line.startswith("> "):
            found[-1] = replace(found[-1], dated=line[2:])
        elif line:
            found[-1].names.append(name_of(line))
    return found


def name_of(line: str) -> Name:
    called, _, said = line.partition(" | ")
    name, _, words = called.partition("(")
    of_original = f"({words}" if words else None
    if said.startswith("left out"):
        return Name(name, of_original, left_out=said.partition(": ")[2] or INTERNAL)
    return Name(name, of_original, said)


def page() -> str:
    """docs/reference/lmcache-names.md with the tables as they are now."""
    text = "\n\n".join(interface.section() for interface in interfaces())
    return _TABLES.sub(lambda found: f"{found[1]}{text}\n\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
