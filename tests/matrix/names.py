# SPDX-License-Identifier: Apache-2.0
"""Every setting of the vLLM that is imported: fields of its configurations, and variables.

``python -m tests.matrix.names`` prints them as JSON, so that the tests can ask each version.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import vllm.config
from vllm import envs

from lmcache_redis.integrations.vllm.identity.pairs import PAIRS
from tests.matrix.left_out import COMPUTED, LEFT_OUT

Setting = tuple[str, str]  # its class, or "environment", or "os.environ", and its name


def settings_of_vllm() -> list[Setting]:
    found = [("environment", name) for name in envs.environment_variables]
    for module in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if dataclasses.is_dataclass(kind) and kind.__module__ == module.name:
                found += [(name, field.name) for field in dataclasses.fields(kind)]
    return found


def verdicts() -> Iterator[tuple[str, str, str]]:
    """(class, name or family of names, verdict)"""
    tables = [*((each.digested, pair) for pair, each in PAIRS.items())]
    tables += [*((names, pair) for pair, names in COMPUTED.items())]
    tables += [*((each.names, each.what) for each in LEFT_OUT)]
    for names, verdict in tables:
        yield from ((kind, name, verdict) for kind in names for name in names[kind].split())


def read_without_envs() -> list[Setting]:
    """Those of the tables under ``os.environ`` that the sources of this vLLM name."""
    names = {name for kind, name, _ in verdicts() if kind == "os.environ"}
    found = set()
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text(errors="replace")
        found |= {name for name in names if name in text}
    return [("os.environ", name) for name in sorted(found)]


if __name__ == "__main__":
    json.dump([vllm.__version__, settings_of_vllm() + read_without_envs()], sys.stdout)
