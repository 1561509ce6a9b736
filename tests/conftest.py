"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# The first text that hypothesis makes in a fresh checkout takes seconds: it builds its tables.
settings.register_profile("tests", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure() -> None:
    """Servers are looked for beside the interpreter too.

    `scripts/setup` links one there where the machine has none on its PATH; a PATH of the
    machine's own comes first.
    """
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
