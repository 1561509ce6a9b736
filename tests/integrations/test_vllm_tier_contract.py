# SPDX-License-Identifier: Apache-2.0
"""What the tier uses of vLLM: fails, and names it, when a release moves the interface.

The matrix runs this and the tests of the tier in newer releases, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
