"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def pytest_configure() -> None:
    """Servers are looked for beside the interpreter too.

    `scripts/setup` links one there where the machine has none on its PATH; a PATH of the
    machine's own comes first.
    """
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
