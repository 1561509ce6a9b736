# SPDX-License-Identifier: Apache-2.0
"""What the tier uses of vLLM: fails, and names it, when a release moves the interface.

The installed vLLM is looked at, and newer ones whose Python `scripts/test --matrix` has unpacked:
there the tests of the tier run as well.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lmcache_redis.integrations.vllm import TIER_TYPE, register
from lmcache_redis.integrations.vllm_tier import CPUTieringOffloadingSpec, RedisTierManager
from lmcache_redis.integrations.vllm_tier.cpu import HostCopyWorker
from tests.matrix.versions import python_of_versions

ROOT = Path(__file__).parents[2]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("ours", [RedisTierManager, HostCopyWorker, CPUTieringOffloadingSpec])
def test_nothing_abstract_of_vllm_is_left_open(ours: type) -> None:
    assert not getattr(ours, "__abstractmethods__", None)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(SecondaryTierManager, RedisTierManager), (OffloadingWorker, HostCopyWorker)],
)
def test_methods_take_what_vllm_gives(theirs: type, ours: type) -> None:
    """Ours may take more, with defaults: what a newer vLLM gives."""
    for name, method in vars(theirs).items():
        if name == "__init__" or not callable(method) or name not in vars(ours):
            continue
        given, taken = parameters(method), inspect.signature(vars(ours)[name]).parameters
        assert [n for n in taken if n != "self"][: len(given)] == given, name
        assert all(p.default is not p.empty for p in list(taken.values())[len(given) + 1 :]), name


def test_chunks_are_made_of_ranks_as_known() -> None:
    for method in (TieringOffloadingSpec.create_worker, CPUOffloadingSpec.__init__):
        source = inspect.getsource(method)
        assert "replicated_layout" in source, "a chunk is made of ranks in another way"
    assert "drain_jobs" in inspect.getsource(TieringOffloadingManager.reset_cache)


def test_the_plugin_registers_the_tier_by_name() -> None:
    register()
    register()  # vLLM calls it in each process, and a test before it
    assert SecondaryTierFactory.get_tier_class({"type": TIER_TYPE}) is RedisTierManager


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.skipif("LMCACHE_REDIS_TEST_NESTED" in os.environ, reason="runs in a newer vLLM")
def test_the_tier_runs_in_newer_releases() -> None:
    """Tier and worker need nothing compiled of vLLM, so that their tests run in its Python."""
    newer = python_of_versions()
    if not newer:
        pytest.skip("no newer vLLM is unpacked")
    files = [f"tests/integrations/{name}.py" for name in ("test_vllm_tier", Path(__file__).stem)]
    code = (
        "import sys, pytest, vllm; assert vllm.__version__ == sys.argv[1], vllm.__file__; "
        "sys.exit(pytest.main(['-n0', '-q', '-m', 'unit or servers', *sys.argv[2:]]))"
    )
    for version, directory in newer.items():
        ran = subprocess.run(
            [sys.executable, "-c", code, version, *files],
            env={
                **os.environ,
                "LMCACHE_REDIS_TEST_NESTED": "1",
                "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]),
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, f"{version}: {ran.stdout[-3000:]}{ran.stderr[-1000:]}"
