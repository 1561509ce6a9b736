# SPDX-License-Identifier: Apache-2.0
"""The subjects of commits: `component: imperative`, at most 72 characters. `scripts/check` runs it.

CONTRIBUTING.md has the rule. Read are the commits since one, without merges and reverts, as far as
the clone has them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_SINCE = "760049b7"
_MOST_LETTERS = 72
_COMPONENT = r"[a-z][a-z0-9_./-]*"
_SUBJECT = re.compile(
    rf"{_COMPONENT}(, {_COMPONENT})*( and {_COMPONENT})?: (?!(an?|the) )[a-z].*[^.\s]"
)


def fault(subject: str) -> str:
    """What is wrong with a subject; empty if nothing is."""
    # A clone of one commit has a merge without its parents.
    if subject.startswith(('Revert "', "Merge ")):
        return ""
    if len(subject) > _MOST_LETTERS:
        return f"has {len(subject)} characters, at most {_MOST_LETTERS} are allowed"
    return "" if _SUBJECT.fullmatch(subject) else 'is not of the form "component: change it"'


def _subjects() -> Iterator[tuple[str, str]]:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(("git", *words), cwd=_ROOT, capture_output=True, text=True)

    is_there = git("merge-base", "--is-ancestor", _SINCE, "HEAD").returncode == 0
    some = f"{_SINCE}..HEAD" if is_there else "HEAD"
    # A shallow clone that lacks the commit has newer ones alone; other copies have no log.
    if is_there or git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        for line in git("log", "--no-merges", "--format=%h %s", some).stdout.splitlines():
            number, _, subject = line.partition(" ")
            yield number, subject


def main() -> int:
    faults = [
        f"{number}: {subject!r} {why}" for number, subject in _subjects() if (why := fault(subject))
    ]
    print("\n".join(faults) or "All subjects of commits follow CONTRIBUTING.md.")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
