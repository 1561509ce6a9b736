# SPDX-License-Identifier: Apache-2.0
"""The order of the KV cache that an engine asks for, as vLLM itself takes the wish."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_cache_layout", reason="needs vLLM 0.29 or newer")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from lmcache_redis.integrations.vllm import making, support

EVERY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
PATH = "lmcache_redis.integrations.vllm.connector"


def transfer(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheRedisConnector",
        "kv_connector_module_path": PATH,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Executor:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config


def resolved(transfer: dict[str, Any], supported: list[str]) -> str:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer))
    executor = Executor(config)
    making.executors.add(executor)
    return str(resolve_kv_cache_layout(config, [supported, supported]).name)


@pytest.mark.parametrize(
    ("extra", "supported", "layout"),
    [
        ({}, EVERY, "LBNHC"),
        ({"kv_cache_layout": None}, EVERY, "LBNHC"),
        ({"kv_cache_layout": "BLNHC"}, EVERY, "BLNHC"),
        ({"kv_cache_layout": "BLHNC"}, EVERY, "BLHNC"),
        ({"kv_cache_layout": "BLNHC"}, ["LBHNC", "BLHNC"], "LBHNC"),  # FlashInfer on Blackwell
        ({"kv_cache_layout": "BLHNC"}, ["LBHNC"], "LBHNC"),  # vLLM on a CPU
        ({"kv_cache_layout": "HND"}, EVERY, "LBNHC"),  # the cache stays off
        ({"no_such_setting": 1}, EVERY, "LBNHC"),
    ],
)
def test_a_layout_is_a_wish(extra: dict[str, Any], supported: list[str], layout: str) -> None:
    assert resolved(transfer(**extra), supported) == layout


def test_beside_other_connectors_nothing_is_asked_for() -> None:
    """vLLM does not start if the wishes of a MultiConnector's children differ."""
    children = [transfer(kv_cache_layout="BLNHC")]
    children.append({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    assert resolved(multi, EVERY) == "LBHNC"


def test_an_engine_that_was_not_seen_asks_for_nothing() -> None:
    """It may be a child of a MultiConnector."""
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer(kv_cache_layout="BLNHC")))
    assert str(resolve_kv_cache_layout(config, [EVERY, EVERY]).name) == "LBNHC"


@pytest.mark.parametrize(("device", "layout"), [("cpu", None), ("cuda", "BLNHC")])
def test_mla_on_a_cpu_needs_blocks_that_are_one_piece(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str | None
) -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer(kv_cache_layout="BLNHC")))
    monkeypatch.setattr(support, "is_of_an_engine", lambda _: True)
    monkeypatch.setattr(config, "model_config", SimpleNamespace(use_mla=True))
    monkeypatch.setattr(config.device_config, "device_type", device)
    assert support.wanted_layout(config) == layout


def test_an_error_of_ours_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "is_of_an_engine", None)
    assert resolved(transfer(kv_cache_layout="BLNHC"), EVERY) == "LBNHC"
    assert "please report this" in caplog.text


@pytest.mark.parametrize("module", [None, SimpleNamespace(KVCacheLayout=Enum("Other", ["LBNHC"]))])
def test_what_this_vllm_lacks_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    """It would not start."""
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer(kv_cache_layout="BLNHC")))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", module)
    assert support.wanted_layout(config) is None
