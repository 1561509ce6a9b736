# SPDX-License-Identifier: Apache-2.0
"""Tests of what a small environment lacks (`scripts/setup --small`) are skipped, with the reason.

Hooks, which `conftest` takes in. Elsewhere all of it is there, and they change nothing: an import
that fails is an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# What such an environment is small without.
LARGE = (
    "matplotlib",
    "openai",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
)


@functools.cache
def _is_absent(name: str) -> bool:
    return name in LARGE and find_spec(name) is None


def reason(error: BaseException | None) -> str | None:
    """Why a test is skipped that failed so; None if it has failed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            if _is_absent(name):
                return f"needs {name}, which scripts/setup installs without --small"
        error = error.__cause__ or error.__context__
    return None


class _Module(pytest.Module):
    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except (self.CollectError, pytest.skip.Exception) as error:
            # Half of it: who imports from it later is to hear the same.
            for name, module in [*sys.modules.items()]:
                if getattr(module, "__file__", None) == str(self.path):
                    del sys.modules[name]
            if (why := reason(error)) is not None:
                pytest.skip(why, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = _Module.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except ImportError as error:
        if (why := reason(error)) is not None:
            pytest.skip(why)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except ImportError as error:
        if (why := reason(error)) is not None:
            pytest.skip(why)
        raise
