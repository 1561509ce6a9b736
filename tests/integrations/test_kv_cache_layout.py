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
from tests.engines import transfer_config

EVERY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]


def ours(**extra: Any) -> dict[str, Any]:
    path = "lmcache_redis.integrations.vllm.connector"
    return {**transfer_config("ipc:///nowhere", **extra), "kv_connector_module_path": path}


def asking(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(**ours(**extra))


def config_of(transfer: KVTransferConfig) -> VllmConfig:
    return VllmConfig(kv_transfer_config=transfer)


class Executor:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config


def resolved(transfer: KVTransferConfig, supported: list[str] = EVERY, seen: bool = True) -> str:
    """What vLLM takes. seen: it was seen making this engine."""
    config = config_of(transfer)
    executor = Executor(config)
    if seen:
        making.executors.add(executor)
    return str(resolve_kv_cache_layout(config, [supported, supported]).name)


@pytest.mark.parametrize(
    ("extra", "supported", "layout"),
    [
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
    assert resolved(asking(**extra), supported) == layout


def test_beside_other_connectors_nothing_is_asked_for() -> None:
    """vLLM does not start if the wishes of a MultiConnector's children differ."""
    others = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    multi = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [ours(), others]},
    )
    assert resolved(multi) == "LBHNC"  # the other's wish
    # An engine that was not seen may be a child of one.
    assert resolved(asking(), seen=False) == "LBNHC"


@pytest.mark.parametrize(("device", "layout"), [("cpu", None), ("cuda", "BLNHC")])
def test_mla_on_a_cpu_needs_blocks_that_are_one_piece(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str | None
) -> None:
    config = config_of(asking())
    monkeypatch.setattr(support, "is_of_an_engine", lambda _: True)
    monkeypatch.setattr(config, "model_config", SimpleNamespace(use_mla=True))
    monkeypatch.setattr(config.device_config, "device_type", device)
    assert support.wanted_layout(config) == layout


def test_an_error_of_ours_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "is_of_an_engine", None)
    assert resolved(asking()) == "LBNHC"
    assert "please report this" in caplog.text


@pytest.mark.parametrize("module", [None, SimpleNamespace(KVCacheLayout=Enum("Other", ["LBNHC"]))])
def test_what_this_vllm_lacks_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    """It would not start."""
    config = config_of(asking())
    monkeypatch.setattr(support, "is_of_an_engine", lambda _: True)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", module)
    assert support.wanted_layout(config) is None
