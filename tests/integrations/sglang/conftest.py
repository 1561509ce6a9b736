# SPDX-License-Identifier: Apache-2.0
"""SGLang's own classes, from its wheel; without it these tests are skipped, with the reason.

`scripts/setup` unpacks the wheel, and what it imports, into .venv/opt.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings

import pytest

from tests.servers import unpacked_packages

# It has builds for CUDA only, and models that see pictures need it: no class that is used here.
UNUSED = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    found = sorted(unpacked_packages().glob("sglang-[0-9]*[0-9]"), reverse=True)
    if not found:
        pytest.skip("needs SGLang's wheel, which scripts/setup unpacks")
    sys.path.append(str(found[0]))
    importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
    if importlib.util.find_spec("torchvision") is None:
        for name in UNUSED:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module)["InterpolationMode"] = None
            sys.modules[name] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.srt.managers.cache_controller")
