# SPDX-License-Identifier: Apache-2.0
"""What is not supported is said at start, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.config import CacheConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestOptions, TenantNames
from lmcache_redis.integrations.vllm.support import adapters_only, may_load, supported_groups

BLOCK = 16
ATTENTION: dict[str, Any] = {
    "block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32,
}  # fmt: skip
ATTENDS = FullAttentionSpec(**ATTENTION)
LATENT = MLAAttentionSpec(**ATTENTION)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=128)
LOCAL = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=8192)
STATES = MambaSpec(
    block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
NOT_KEPT = replace(STATES, mamba_cache_mode="none")


class SinkFullAttentionSpec(FullAttentionSpec):
    """Known by its name."""


def mixed(*specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={f"layer.{n}": spec for n, spec in enumerate(specs)}
    )


def engine(**changes: dict[str, Any]) -> Any:
    """Settings of an engine that is supported, but for ``changes`` (by config)."""
    settings: dict[str, dict[str, Any]] = {
        "model_config": {},
        "cache_config": {
            "block_size": BLOCK,
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
        },
        "parallel_config": {},
        "device_config": {"device_type": "cuda"},
    }
    for name, change in changes.items():
        settings[name] = settings.get(name, {}) | change
    return SimpleNamespace(**{name: SimpleNamespace(**each) for name, each in settings.items()})


def caches(*specs: object, transferred: bool = True) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, enable_kv_transfer=transferred) for spec in specs
        ]
    )


FULL = caches(ATTENDS)


def unsupported(engine: Any, found: Any, *, takes_failed_loads: bool = True) -> str:
    """Why the engine cannot be cached; empty if it can be."""
    try:
        supported_groups(engine, found, takes_failed_loads=takes_failed_loads)
    except Unsupported as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spec", [ATTENDS, LATENT, mixed(ATTENDS, LATENT)])
def test_full_attention_is_supported_by_every_version(spec: object) -> None:
    assert not unsupported(engine(), caches(spec))
    assert not unsupported(engine(device_config={"device_type": "cpu"}), caches(spec))
    # As later versions have them, with their defaults.
    later = engine(
        cache_config={"hash_block_size": 16, "prefix_match_unit": None},
        parallel_config={"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        model_config={"is_encoder_decoder": False, "is_prefix_caching_supported": True},
    )
    assert not unsupported(later, caches(spec))


LAUNCHED = {"distributed_executor_backend": "external_launcher"}
MADE_SCALES = {"cache_dtype": "fp8", "calculate_kv_scales": True}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash"}}, "xxhash"),
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash_cbor"}}, "xxhash_cbor"),
        ({"cache_config": {"prefix_caching_hash_algo": "builtin"}}, "builtin"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel"),
        ({"parallel_config": LAUNCHED | {"world_size": 2}}, "external_launcher"),
        ({"cache_config": {"hash_block_size": 32}}, "covers 32"),
        ({"cache_config": {"prefix_match_unit": 12}}, "covers 12"),
        ({"cache_config": {"block_size": 0}}, "0 tokens"),
        ({"cache_config": {"block_size": None}}, "0 tokens"),
        ({"device_config": {"device_type": "tpu"}}, "tpu"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"is_diffusion": True}}, "diffusion"),
        ({"model_config": {"is_prefix_caching_supported": False}}, "prefix caching"),
        ({"cache_config": MADE_SCALES}, "calculate-kv-scales"),
    ],
)
def test_a_setting_that_does_not_go_is_named(changes: dict[str, Any], word: str) -> None:
    reason = unsupported(engine(**changes), FULL)
    assert word in reason
    assert "\n" not in reason


def test_a_launcher_of_one_rank_is_as_any_other() -> None:
    assert not unsupported(engine(parallel_config=LAUNCHED | {"world_size": 1}), FULL)
    several = {"distributed_executor_backend": "mp", "world_size": 2}
    assert not unsupported(engine(parallel_config=several), FULL)


def test_rocm_calls_itself_cuda_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not unsupported(engine(), FULL)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    reason = unsupported(engine(), FULL)
    assert "ROCm" in reason
    assert not unsupported(engine(device_config={"device_type": "cpu"}), FULL)


@pytest.mark.parametrize("config", ["aux_output_config", "model_config"])  # since 0.31, before
def test_routed_experts_are_not_loaded(config: str) -> None:
    returns = engine(**{config: {"enable_return_routed_experts": True}})
    assert may_load(engine())
    assert may_load(engine(aux_output_config={"enable_return_routed_experts": False}))
    assert not may_load(returns)
    assert not unsupported(returns, FULL)


def test_hashes_that_differ_in_every_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not unsupported(engine(), FULL)
    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")  # as in older versions
    assert "PYTHONHASHSEED" in unsupported(engine(), FULL)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not unsupported(engine(), FULL)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (caches(), "no KV cache"),
        (caches(ATTENDS, NOT_KEPT), "group 1 (MambaSpec): states are not"),
        (caches(NOT_KEPT), "--mamba-cache-mode align"),
        (
            caches(SinkFullAttentionSpec(**ATTENTION)),
            "group 0 (SinkFullAttentionSpec): this version does not",
        ),
        (
            caches(mixed(ATTENDS, STATES)),
            "group 0 (FullAttentionSpec and MambaSpec): its layers need different blocks",
        ),
        (caches(mixed(ATTENDS, NOT_KEPT)), "states are not kept"),
        (caches(ATTENDS, transferred=False), "vLLM does not let connectors load it"),
    ],
)
def test_a_cache_that_is_not_handled_is_refused_by_group(found: Any, word: str) -> None:
    assert word in unsupported(engine(), found)


@pytest.mark.parametrize(
    "specs",
    [
        [WINDOW],
        [WINDOW, ATTENDS],
        [ATTENDS, LOCAL],
        [STATES, replace(STATES, mamba_cache_mode="all"), LATENT],
        [mixed(WINDOW, WINDOW)],
    ],
)
def test_groups_of_every_kind_are_handled(specs: list[object]) -> None:
    assert not unsupported(engine(), caches(*specs))


def test_several_groups_need_a_vllm_that_takes_failed_loads() -> None:
    for specs in ([ATTENDS, LATENT], [WINDOW]):
        reason = unsupported(engine(), caches(*specs), takes_failed_loads=False)
        assert "vLLM 0.30 or newer" in reason
    assert not unsupported(engine(), FULL, takes_failed_loads=False)


def test_states_are_kept_where_steps_end() -> None:
    reason = unsupported(engine(), caches(ATTENDS, replace(STATES, block_size=64)))
    assert "keeps states every 64 tokens, and vLLM ends its steps every 16" in reason


def test_the_settings_of_this_vllm_are_those_that_are_meant() -> None:
    parallel = ParallelConfig()
    real: Any = SimpleNamespace(
        model_config=SimpleNamespace(),
        cache_config=CacheConfig(block_size=BLOCK),
        parallel_config=parallel,
    )
    assert not unsupported(real, FULL)
    parallel.decode_context_parallel_size = 2
    assert unsupported(real, FULL)


@pytest.mark.parametrize(("has_hooks", "device", "is_fit"), [
    (False, "cuda", False), (False, "cpu", True), (True, "cuda", True),
])  # fmt: skip
def test_sleep_mode_needs_a_vllm_that_tells_connectors(
    monkeypatch: pytest.MonkeyPatch, has_hooks: bool, device: str, is_fit: bool
) -> None:
    """Before, vLLM unmaps memory that the agent has mapped, and maps other memory there."""
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    if has_hooks:
        hook = lambda self: None  # noqa: E731
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", hook, raising=False)
    settings = engine(
        model_config={"enable_sleep_mode": True}, device_config={"device_type": device}
    )
    reason = unsupported(settings, FULL)
    assert is_fit == (not reason)
    assert is_fit or "it needs vLLM 0.33 or newer" in reason


@pytest.mark.parametrize(
    ("device", "lora", "adds", "only"),
    [
        ("cpu", True, 1.0, True),  # vLLM 0.32: no adapter is the last one
        ("cpu", True, 0.0, False),  # vLLM 0.33
        ("cpu", False, 1.0, False),
        ("cuda", True, 1.0, False),  # another function computes there
    ],
)
def test_prompts_without_an_adapter_beside_some_with_one(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    lora: bool,
    adds: float,
    only: bool,
) -> None:
    def expand(x: Any, weights: Any, output: Any, indices: Any, add_inputs: bool) -> None:
        output += adds

    monkeypatch.setattr("vllm.lora.ops.torch_ops.bgmv_expand", expand)
    settings = engine(device_config={"device_type": device})
    settings.lora_config = object() if lora else None
    assert adapters_only(settings) is only
    assert ("prompts without an adapter are not cached" in caplog.text) is only
    monkeypatch.setattr("vllm.lora.ops.torch_ops.bgmv_expand", None)  # moved by another vLLM
    assert adapters_only(settings) is (lora and device == "cpu")


@pytest.mark.parametrize("adapter", [None, object()])
def test_where_adapters_only_are_cached(adapter: object) -> None:
    request: Any = SimpleNamespace(kv_transfer_params=None, lora_request=adapter)
    options = RequestOptions.of(request, CachePolicy(16, adapters_only=True), TenantNames())
    assert (options.load, options.store) == (adapter is not None,) * 2
    options = RequestOptions.of(request, CachePolicy(16), TenantNames())
    assert (options.load, options.store) == (True, True)
